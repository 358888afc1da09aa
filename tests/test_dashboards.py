"""The dashboards of deploy/: they are what their description says, and ask for metrics and labels that a server has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from quire_interfaces import GRAMMAR_COMPILE_BOUNDS_S, FinishReason, SchedulerStats
from quire_multimodal import MediaStats
from quire_observability import EngineMetrics

DEPLOY = Path(__file__).parents[1] / "deploy"
VLLM_METRICS = """
num_requests_running num_requests_waiting num_requests_waiting_by_reason num_requests_kv_fetch_by_stage
engine_sleep_state kv_cache_usage_perc corrupted_requests watermark_requests prefix_cache_queries prefix_cache_hits
external_prefix_cache_queries external_prefix_cache_hits mm_cache_queries mm_cache_hits num_preemptions prompt_tokens
prompt_tokens_by_source prompt_tokens_cached prompt_tokens_cached_by_source generation_tokens request_success
admission_rejections request_prompt_tokens request_generation_tokens iteration_tokens_total
request_max_num_generation_tokens request_params_n request_params_max_tokens time_to_first_token_seconds
inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds
request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds
request_num_preemptions request_prefill_kv_computed_tokens kv_block_lifetime_seconds
kv_block_idle_before_evict_seconds kv_block_reuse_gap_seconds lora_requests_info cache_config_info
estimated_flops_per_gpu_total estimated_read_bytes_per_gpu_total estimated_write_bytes_per_gpu_total
spec_decode_num_drafts spec_decode_num_draft_tokens spec_decode_num_accepted_tokens
spec_decode_num_accepted_tokens_per_pos diffusion_num_denoising_steps diffusion_num_canvas_positions
diffusion_num_committed_tokens sleep_mode_operation_duration_seconds sleep_mode_operations_in_flight
websocket_connections_active websocket_connections_total websocket_connection_duration_seconds
tool_call_parser_invocations_total
""".split()
"""Of vLLM 0.33.0, but for those of its connectors and of weight updates."""
SCRAPE_LABELS = {"instance", "job"}
"""What Prometheus adds."""
FUNCTIONS = {"histogram_quantile", "increase", "rate"}
AGGREGATIONS = {"max", "min", "sum"}
TOKENS = re.compile(r'\s*([a-zA-Z_][\w:]*|"[^"]*"|\d+(?:\.\d+)?|\$\w+|=~|!~|!=|[-+*/=(){}\[\],])')


def live_metrics(prefix: str = "quire") -> EngineMetrics:
    """With everything in it that appears only where it is used."""
    metrics = EngineMetrics(prefix, labels={"model_name": "demo", "engine": "0"})
    metrics.prepared_media = lambda: {"image": MediaStats()}
    metrics.on_pooled("embed", 3, 0.1)
    times = dict.fromkeys(("arrival", "scheduled", "first_token", "last_token", "finished"), 1.0)
    counts = dict.fromkeys(("num_prompt_tokens", "num_cached_tokens", "num_generation_tokens", "num_preemptions"), 1)
    request = {f"{name}_time_s": value for name, value in times.items()} | counts
    metrics.on_finished(
        SimpleNamespace(**request, max_tokens=2, n=1, tenant="a", request_id="request-0"), FinishReason.LENGTH
    )
    stats = SchedulerStats(
        num_accepted_tokens_per_pos_total=[1],
        grammar_compile_counts_total=[0] * (len(GRAMMAR_COMPILE_BOUNDS_S) + 1),
        num_encoded_items_total={"image": 1},
        num_encoded_embeds_total={"image": 1},
        encode_seconds_total={"image": 0.1},
        jit_compilations_total={"attention": 1},
        expert_rank_tokens_total={"0": 1},
        num_adapter_slots=1,
        adapter_requests_running={"adapter": 1},
        adapter_requests_waiting={"adapter": 1},
    )
    metrics.on_step(1, stats)
    return metrics


def sample_labels(metrics: EngineMetrics) -> dict[str, set[str]]:
    """Name of a sample -> its labels."""
    found: dict[str, set[str]] = {}
    for family in metrics.collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def queries(dashboard: Any) -> Iterator[tuple[str, str]]:
    """(expression, legend) of all panels, of Grafana's or of Perses's dashboard."""
    if isinstance(dashboard, list):
        for each in dashboard:
            yield from queries(each)
    elif isinstance(dashboard, dict):
        if "expr" in dashboard:
            yield dashboard["expr"], dashboard["legendFormat"]
        elif "seriesNameFormat" in dashboard:
            yield dashboard["query"], dashboard["seriesNameFormat"]
        else:
            for each in dashboard.values():
                yield from queries(each)


def tokens(expression: str) -> list[str]:
    """Of PromQL, as far as the dashboards use it."""
    found, position = [], 0
    while position < len(expression.rstrip()):
        match = TOKENS.match(expression, position)
        assert match is not None, f"{expression!r} at {expression[position:]!r}"
        found.append(match[1])
        position = match.end()
    return found


def closing(words: list[str], start: int) -> int:
    """Where the bracket that opens at `start` closes."""
    pairs, open_brackets = {"(": ")", "[": "]", "{": "}"}, []
    for index, word in enumerate(words[start:], start):
        if word in pairs:
            open_brackets.append(pairs[word])
        elif word in pairs.values():
            assert open_brackets, f"{word!r} closes nothing: {' '.join(words)}"
            assert word == open_brackets.pop(), f"{word!r} closes another bracket: {' '.join(words)}"
            if not open_brackets:
                return index
    raise AssertionError(f"a bracket stays open: {' '.join(words)}")


def check_expression(expression: str, legend: str, labels: dict[str, set[str]]) -> set[str]:
    """Raises AssertionError where it is none that Prometheus would take, or asks for what there is not; returns the
    metrics in it."""
    words = tokens(expression)
    closing(["(", *words, ")"], 0)
    names, grouped = set(), set[str]()
    for index, word in enumerate(words):
        after = words[index + 1] if index + 1 < len(words) else ""
        if word in AGGREGATIONS:
            assert after in ("by", "("), expression
            if after == "by":
                end = closing(words, index + 2)
                by = set(words[index + 3 : end]) - {","}
                inside = words[end + 1 : closing(words, end + 1)]
                for name in filter(lambda each: ":" in each, inside):
                    assert by <= labels[name] | SCRAPE_LABELS, f"{name} has no label {by - labels[name]}"
                grouped |= by
        elif ":" in word:
            assert word in labels, f"there is no metric {word}"
            names.add(word)
            assert after == "{", f"{word} without the dashboard's variables"
            matchers = words[index + 2 : closing(words, index + 1)]
            assert set(matchers[::4]) <= labels[word] | SCRAPE_LABELS, matchers
            assert set(matchers[1::4]) == {"=~"}
        elif after == "(" and word.isidentifier() and word not in ("by", "on", "group_left"):
            assert word in FUNCTIONS, f"{word} is no function that the dashboards use: {expression}"
    for histogram in re.findall(r"histogram_quantile\([\d.]+, sum by \(([\w, ]*)\)", expression):
        assert "le" in histogram.split(", "), expression
    # A counter is read through its increase, a gauge as it is.
    for name in names:
        is_rising = name.endswith(("_total", "_bucket", "_sum", "_count"))
        assert is_rising == (f"rate({name}" in expression or f"increase({name}" in expression), expression
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= grouped, f"{legend!r} of {expression}"
    return names


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DEPLOY))
    import write_dashboards

    return write_dashboards


def test_the_files_are_what_the_command_writes(tmp_path: Path) -> None:
    command = [sys.executable, str(DEPLOY / "write_dashboards.py"), "--out", str(tmp_path)]
    written = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert len(written) == 2
    for path in map(Path, written):
        name = path.relative_to(tmp_path)
        assert path.read_text() == (DEPLOY / name).read_text(), f"run deploy/write_dashboards.py: {name} is old"


@pytest.mark.parametrize("prefix", ["quire", "vllm"])
def test_expressions_ask_for_what_a_server_has(writer: Any, prefix: str) -> None:
    labels = sample_labels(live_metrics(prefix))
    grafana = list(queries(writer.grafana_dashboard(prefix)))
    assert grafana == list(queries(writer.perses_dashboard(prefix)))
    named = set()
    for expression, legend in grafana:
        named |= check_expression(expression, legend, labels)
    # What no panel shows is what is told otherwise, or is a part of what is shown.
    families = {re.sub(r"_(total|bucket|sum|count)$", "", name.partition(":")[2]) for name in labels}
    shown = {re.sub(r"_(total|bucket|sum|count)$", "", name.partition(":")[2]) for name in named}
    assert families - shown <= {
        "mm_encoded_embeds",
        "mm_prepared_embeds",
        "engine_sleep_state",
        "lora_requests_info",
        "prompt_tokens_cached_by_source",
        "request_max_num_generation_tokens",
        "request_prefill_kv_computed_tokens",
        "request_inference_time_seconds",
        "request_num_preemptions",
        "request_params_max_tokens",
        "request_params_n",
        "request_time_per_output_token_seconds",
        *{name for name in families if name.endswith("_created")},
    }


def test_the_page_tells_which_metrics_of_vllm_are_missing() -> None:
    metrics = live_metrics("vllm")
    metrics.set_cache_config(block_size=16)
    have = {family.name.removeprefix("vllm:") for family in metrics.collect()}
    page = (DEPLOY.parent / "docs/operations.md").read_text()
    table = page.partition("<!-- not in /metrics -->")[2].partition("\n\nNames")[0]
    told = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1] if row else "")}
    assert set(VLLM_METRICS) - have == told - {"http_requests_total", "http_request_duration_seconds"}


@pytest.mark.parametrize(
    "expression",
    [
        'sum(rate(quire:no_such_total{engine=~"$engine"}[$__rate_interval]))',
        'sum by (tenant) (rate(quire:prompt_tokens_total{engine=~"$engine"}[$__rate_interval]))',
        'sum(quire:prompt_tokens_total{engine=~"$engine"})',
        'sum(rate(quire:prompt_tokens_total{engine=~"$engine"}[$__rate_interval])',
        'sum(rates(quire:prompt_tokens_total{engine=~"$engine"}[$__rate_interval]))',
        'sum(quire:num_requests_running{source=~"$engine"})',
        "sum(quire:num_requests_running)",
    ],
)
def test_what_is_wrong_is_noticed(expression: str) -> None:
    with pytest.raises(AssertionError):
        check_expression(expression, "", sample_labels(live_metrics()))


def test_panels_of_grafana_do_not_lie_over_each_other(writer: Any) -> None:
    dashboard = writer.grafana_dashboard("quire")
    panels = [inner for panel in dashboard["panels"] for inner in (panel, *panel.get("panels", ()))]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for group in [dashboard["panels"], *(panel["panels"] for panel in dashboard["panels"] if panel.get("panels"))]:
        cells: set[tuple[int, int]] = set()
        for place in (panel["gridPos"] for panel in group):
            assert place["x"] + place["w"] <= 24
            mine = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
            assert not cells & mine
            cells |= mine


def test_layouts_of_perses_name_every_panel() -> None:
    spec = json.loads((DEPLOY / "perses/quire.json").read_text())["spec"]
    items = [item["content"]["$ref"] for layout in spec["layouts"] for item in layout["spec"]["items"]]
    assert sorted(items) == sorted(f"#/spec/panels/{name}" for name in spec["panels"])


def test_grafana_of_the_compose_file_finds_its_files() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    mounts = dict(volume.split(":")[1::-1] for volume in services["grafana"]["volumes"])
    assert all((DEPLOY / source).exists() for source in mounts.values())
    folder = DEPLOY / "grafana/provisioning"
    (source,) = yaml.safe_load((folder / "datasources/prometheus.yml").read_text())["datasources"]
    host, port = source["url"].removeprefix("http://").split(":")
    assert services[host]["ports"] == [f"127.0.0.1:{port}:{port}"]
    (provider,) = yaml.safe_load((folder / "dashboards/quire.yml").read_text())["providers"]
    assert f"{provider['options']['path']}/quire.json" in mounts


def test_prometheus_takes_the_expressions(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not here: the expressions of the dashboards were NOT checked by it")
    dashboard = json.loads((DEPLOY / "grafana/quire.json").read_text())
    rules = [
        {"record": f"panel_{index}", "expr": expression.replace("$__rate_interval", "5m")}
        for index, (expression, _) in enumerate(queries(dashboard))
    ]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": rules}]}))
    subprocess.run(["promtool", "check", "rules", path], check=True)
