"""What is reported can be scraped, under the names that dashboards rely on."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from quire_interfaces import GRAMMAR_COMPILE_BOUNDS_S, ConfigError, FinishReason, SchedulerStats
from quire_observability import EngineMetrics, Histogram

README = Path(__file__).resolve().parents[1] / "README.md"

DASHBOARD_SAMPLES = """
num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc
prefix_cache_queries_total prefix_cache_hits_total
external_prefix_cache_queries_total external_prefix_cache_hits_total
prompt_tokens_total prompt_tokens_cached_total prompt_tokens_by_source_total generation_tokens_total
iteration_tokens_total_bucket
request_success_total num_preemptions_total admission_rejections_total time_to_first_token_seconds_bucket
inter_token_latency_seconds_bucket request_time_per_output_token_seconds_bucket e2e_request_latency_seconds_bucket
request_queue_time_seconds_sum request_inference_time_seconds_sum request_prefill_time_seconds_count
request_decode_time_seconds_count request_prompt_tokens_bucket request_generation_tokens_bucket
request_params_n_bucket request_params_max_tokens_bucket request_num_preemptions_bucket
grammar_cache_queries_total grammar_cache_hits_total grammar_compile_failures_total
spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total
request_prefill_kv_computed_tokens_bucket request_max_num_generation_tokens_bucket
prompt_tokens_cached_by_source_total engine_sleep_state cache_config_info
""".split()


def samples(metrics: EngineMetrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """(sample name, labels) -> value, as a scraper reads them."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def value(metrics: EngineMetrics, name: str, **labels: str) -> float:
    return samples(metrics)[name, frozenset(labels.items())]


def request(**changes: Any) -> SimpleNamespace:
    fields = {
        "request_id": "request-0",
        "arrival_time_s": 100.0,
        "scheduled_time_s": 100.5,
        "first_token_time_s": 102.0,
        "last_token_time_s": 104.0,
        "finished_time_s": 104.25,
        "num_prompt_tokens": 11,
        "num_cached_tokens": 3,
        "num_generation_tokens": 5,
        "num_preemptions": 1,
        "max_tokens": 64,
        "tenant": None,
        "n": 2,
    }
    return SimpleNamespace(**(fields | changes))


@pytest.mark.parametrize("prefix", ["quire", "vllm"])
def test_all_names_are_there_from_the_start(prefix: str) -> None:
    metrics = EngineMetrics(prefix)
    metrics.set_cache_config(block_size=16, num_gpu_blocks=100)
    names = {name for name, _ in samples(metrics)}
    assert {f"{prefix}:{name}" for name in DASHBOARD_SAMPLES} <= names
    assert all(name.startswith(f"{prefix}:") for name in names)
    assert value(metrics, f"{prefix}:cache_config_info", block_size="16", num_gpu_blocks="100") == 1


def test_compilations_are_counted_by_kernel() -> None:
    metrics = EngineMetrics()
    metrics.on_step(1, SchedulerStats(jit_compilations_total={"attend_tiles": 2, "draw_kernel": 1}))
    assert value(metrics, "quire:jit_compilations_total", kernel="attend_tiles") == 2
    assert value(metrics, "quire:jit_compilations_total", kernel="draw_kernel") == 1


def test_statistics_become_gauges_and_counters() -> None:
    metrics = EngineMetrics()
    stats = SchedulerStats(
        num_running=3,
        num_waiting=4,
        kv_cache_usage=0.25,
        num_prompt_tokens_total=50,
        num_generation_tokens_total=60,
        num_preemptions_total=7,
        prefix_cache_query_tokens_total=80,
        prefix_cache_hit_tokens_total=9,
        external_prefix_cache_query_tokens_total=71,
        external_prefix_cache_hit_tokens_total=32,
        num_draft_tokens_total=11,
        num_accepted_tokens_total=10,
        num_drafts_total=5,
    )
    metrics.on_step(0, stats)
    metrics.on_step(33, None)
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 4,
        "kv_cache_usage_perc": 0.25,
        "prompt_tokens_total": 50,
        "generation_tokens_total": 60,
        "num_preemptions_total": 7,
        "prefix_cache_queries_total": 80,
        "prefix_cache_hits_total": 9,
        "external_prefix_cache_queries_total": 71,
        "external_prefix_cache_hits_total": 32,
        "spec_decode_num_draft_tokens_total": 11,
        "spec_decode_num_accepted_tokens_total": 10,
        "spec_decode_num_drafts_total": 5,
        "iteration_tokens_total_count": 1,
        "iteration_tokens_total_sum": 33,
    }
    for name, number in expected.items():
        assert value(metrics, f"quire:{name}") == number


@pytest.mark.parametrize("prefix", ["quire", "vllm"])
def test_breakdowns_add_up_to_what_they_break_down(prefix: str) -> None:
    metrics = EngineMetrics(prefix, labels={"engine": "0"})
    metrics.on_step(
        0,
        SchedulerStats(
            num_waiting=7,
            num_waiting_deferred=3,
            num_prompt_tokens_total=100,
            num_cached_prompt_tokens_total=64,
            num_external_prompt_tokens_total=24,
            prefix_cache_hit_tokens_total=40,
            external_prefix_cache_hit_tokens_total=24,
            num_accepted_tokens_total=9,
            num_accepted_tokens_per_pos_total=[6, 2, 1],
            draft_seconds_total=0.5,
            draft_saved_seconds=-0.25,
        ),
    )
    assert value(metrics, f"{prefix}:spec_decode_draft_seconds_total", engine="0") == 0.5
    assert value(metrics, f"{prefix}:spec_decode_saved_seconds", engine="0") == -0.25
    assert value(metrics, f"{prefix}:num_requests_waiting_by_reason", engine="0", reason="capacity") == 4
    assert value(metrics, f"{prefix}:num_requests_waiting_by_reason", engine="0", reason="deferred") == 3
    assert value(metrics, f"{prefix}:prompt_tokens_by_source_total", engine="0", source="local_compute") == 36
    assert value(metrics, f"{prefix}:prompt_tokens_by_source_total", engine="0", source="local_cache_hit") == 40
    assert value(metrics, f"{prefix}:prompt_tokens_by_source_total", engine="0", source="external_kv_transfer") == 24
    assert value(metrics, f"{prefix}:prompt_tokens_cached_total", engine="0") == 64
    by_position = f"{prefix}:spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(metrics, by_position, engine="0", position=str(i)) for i in range(3)] == [6, 2, 1]
    found = samples(metrics)
    for total, parts in (
        ("num_requests_waiting", "num_requests_waiting_by_reason"),
        ("prompt_tokens_total", "prompt_tokens_by_source_total"),
        ("prompt_tokens_cached_total", "prompt_tokens_cached_by_source_total"),
        ("spec_decode_num_accepted_tokens_total", "spec_decode_num_accepted_tokens_per_pos_total"),
    ):
        together = sum(number for (name, _), number in found.items() if name == f"{prefix}:{parts}")
        assert together == value(metrics, f"{prefix}:{total}", engine="0")


def test_a_finished_request_is_taken_apart() -> None:
    metrics = EngineMetrics()
    metrics.on_finished(request(), FinishReason.STOP)
    metrics.on_finished(request(num_generation_tokens=1), FinishReason.LENGTH)
    expected = {
        "request_queue_time_seconds_sum": 1.0,
        "request_prefill_time_seconds_sum": 3.0,
        "request_decode_time_seconds_sum": 4.0,
        "request_inference_time_seconds_sum": 7.0,
        "e2e_request_latency_seconds_sum": 8.5,
        "request_time_per_output_token_seconds_sum": 0.5,
        "request_time_per_output_token_seconds_count": 1,
        "request_prompt_tokens_sum": 22,
        "request_generation_tokens_sum": 6,
        "request_params_n_sum": 4,
        "request_params_max_tokens_sum": 128,
        "request_num_preemptions_sum": 2,
        "request_prefill_kv_computed_tokens_sum": 16,
    }
    for name, number in expected.items():
        assert value(metrics, f"quire:{name}") == pytest.approx(number)
    assert value(metrics, "quire:request_success_total", finished_reason="stop") == 1
    assert value(metrics, "quire:request_success_total", finished_reason="length") == 1
    assert value(metrics, "quire:request_success_total", finished_reason="abort") == 0


def completion(index: int, num_generation_tokens: int, **changes: Any) -> SimpleNamespace:
    names = {"request_id": f"{changes.get('client_request_id')}-{index}", "client_request_id": None}
    return request(**(names | changes), num_generation_tokens=num_generation_tokens)


def test_the_longest_of_several_completions_is_told_when_all_have_ended() -> None:
    metrics = EngineMetrics()
    name = "quire:request_max_num_generation_tokens"
    first = [completion(i, tokens, n=3, client_request_id="a") for i, tokens in enumerate((4, 9, 2))]
    second = [completion(i, tokens, n=2, client_request_id="b") for i, tokens in enumerate((20, 30))]
    for each in (*first, *second):
        metrics.on_added(each)
    for each in (second[0], *first[:2]):
        metrics.on_finished(each, FinishReason.STOP)
    assert value(metrics, f"{name}_count") == 0
    metrics.on_finished(first[2], FinishReason.LENGTH)
    assert (value(metrics, f"{name}_count"), value(metrics, f"{name}_sum")) == (1, 9)
    metrics.on_rejected(second[1])
    assert (value(metrics, f"{name}_count"), value(metrics, f"{name}_sum")) == (2, 39)
    metrics.on_finished(request(n=1, num_generation_tokens=5), FinishReason.STOP)
    assert (value(metrics, f"{name}_count"), value(metrics, f"{name}_sum")) == (3, 44)


def test_completions_of_which_some_were_not_sent_do_not_wait_for_them() -> None:
    metrics = EngineMetrics()
    halves = [completion(0, 4, n=2, client_request_id=each) for each in ("a", "b")]
    for each in halves:
        metrics.on_added(each)
    metrics.on_finished(halves[0], FinishReason.ABORT)
    assert value(metrics, "quire:request_max_num_generation_tokens_sum") == 4
    metrics.on_added(completion(1, 6, n=2, client_request_id="b"))
    metrics.on_finished(halves[1], FinishReason.STOP)
    assert value(metrics, "quire:request_max_num_generation_tokens_count") == 1


def test_engines_share_the_completions_of_a_prompt() -> None:
    metrics = EngineMetrics(labels={"engine": "0"})
    engines = [metrics.of_engine(rank) for rank in (0, 1)]
    both = [completion(i, tokens, n=2, client_request_id="a") for i, tokens in enumerate((7, 3))]
    for engine, each in zip(engines, both, strict=True):
        engine.on_added(each)
    for engine, each in zip(engines, both, strict=True):
        engine.on_finished(each, FinishReason.STOP)
    name = "quire:request_max_num_generation_tokens_sum"
    assert (value(metrics, name, engine="0"), value(metrics, name, engine="1")) == (0, 7)


def test_a_sleeping_engine_is_not_awake() -> None:
    metrics = EngineMetrics()

    def states() -> dict[str, float]:
        family = next(each for each in metrics.collect() if each.name == "quire:engine_sleep_state")
        return {sample.labels["sleep_state"]: sample.value for sample in family.samples}

    asleep = {"awake": 0, "kv_cache_released": 0, "weights_offloaded": 0, "discard_all": 0}
    assert states() == asleep | {"awake": 1}
    metrics.on_sleep(0)
    assert states() == asleep
    metrics.on_sleep(1)
    assert states() == asleep | {"kv_cache_released": 1}
    metrics.on_sleep(None)
    assert states() == asleep | {"awake": 1}


def test_requests_that_never_ran_have_no_times() -> None:
    metrics = EngineMetrics()
    metrics.on_finished(request(scheduled_time_s=0.0, first_token_time_s=0.0), FinishReason.ABORT)
    metrics.on_finished(request(first_token_time_s=0.0), FinishReason.ERROR)
    assert value(metrics, "quire:request_queue_time_seconds_count") == 1
    assert value(metrics, "quire:request_prefill_time_seconds_count") == 0
    assert value(metrics, "quire:e2e_request_latency_seconds_count") == 2


def test_token_times_and_refusals() -> None:
    metrics = EngineMetrics()
    metrics.on_first_token(0.3)
    metrics.on_tokens(0.4, 4)
    metrics.on_tokens(2.0, 1)
    metrics.on_rejected(request())
    assert value(metrics, "quire:time_to_first_token_seconds_bucket", le="0.25") == 0
    assert value(metrics, "quire:time_to_first_token_seconds_bucket", le="0.5") == 1
    assert value(metrics, "quire:inter_token_latency_seconds_count") == 5
    assert value(metrics, "quire:inter_token_latency_seconds_sum") == pytest.approx(2.4)
    assert value(metrics, "quire:inter_token_latency_seconds_bucket", le="0.1") == 4
    assert value(metrics, "quire:admission_rejections_total") == 1


def test_restarts_by_reason_and_stalls() -> None:
    metrics = EngineMetrics()
    assert value(metrics, "quire:engine_restarts_total", reason="SIGKILL") == 0
    assert value(metrics, "quire:engine_stalls_total") == 0
    for reason in ("SIGKILL", "SIGSEGV", "SIGKILL"):
        metrics.on_restart(reason)
    metrics.on_stall()
    assert value(metrics, "quire:engine_restarts_total", reason="SIGKILL") == 2
    assert value(metrics, "quire:engine_restarts_total", reason="SIGSEGV") == 1
    assert value(metrics, "quire:engine_restarts_total", reason="failure") == 0
    assert value(metrics, "quire:engine_stalls_total") == 1


def test_adapters_have_their_users_name_and_their_tenant() -> None:
    metrics = EngineMetrics(registry=CollectorRegistry())
    metrics.adapter_labels = {"a": ("a", ""), "b@us": ("b", "us")}.__getitem__
    counts = {"a": 2, "b@us": 1}
    stats = SchedulerStats(num_adapter_slots=4, adapter_requests_running=counts, adapter_requests_waiting={"b@us": 1})
    metrics.on_step(1, stats)
    text = metrics.exposition().decode()
    assert 'quire:lora_requests_running{adapter="a",tenant=""} 2.0' in text
    assert 'quire:lora_requests_running{adapter="b",tenant="us"} 1.0' in text
    name = 'quire:lora_requests_info{max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters="b"} '
    assert float(text.partition(name)[2].split()[0]) == pytest.approx(time.time(), abs=60)


def test_experts_have_figures_where_they_are_balanced() -> None:
    metrics = EngineMetrics(registry=CollectorRegistry())
    metrics.on_step(1, SchedulerStats())
    assert "eplb" not in metrics.exposition().decode()
    tokens = {"0": 5, "1": 3}
    stats = SchedulerStats(expert_balancedness=0.8, num_moved_experts_total=2, expert_rank_tokens_total=tokens)
    metrics.on_step(1, stats)
    text = metrics.exposition().decode()
    assert "quire:eplb_balancedness 0.8" in text
    assert "quire:eplb_moved_experts_total 2.0" in text
    assert 'quire:eplb_rank_tokens_total{rank="1"} 3.0' in text


def test_labels_are_on_every_sample() -> None:
    metrics = EngineMetrics(labels={"model_name": 'a "quoted"\nname', "engine": "0"})
    metrics.set_cache_config(block_size=1)
    for _, labels in samples(metrics):
        assert dict(labels)["model_name"] == 'a "quoted"\nname'
    metrics.set_labels(model_name="other")
    assert value(metrics, "quire:num_requests_running", model_name="other") == 0


@pytest.mark.parametrize("prefix", ["", "1st", "a-b", "a:b", "a b"])
def test_wrong_prefixes_are_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="metrics_prefix"):
        EngineMetrics(prefix)


@pytest.mark.parametrize("label", ["a-b", "__name__", "ä"])
def test_wrong_labels_are_refused(label: str) -> None:
    with pytest.raises(ConfigError, match="no label name"):
        EngineMetrics(labels={label: "x"})


def test_a_registry_can_be_shared() -> None:
    registry = CollectorRegistry()
    Counter("http_requests", "of the server", registry=registry).inc()
    metrics = EngineMetrics(registry=registry)
    names = {name for name, _ in samples(metrics)}
    assert {"http_requests_total", "quire:num_requests_running"} <= names


@given(st.lists(st.tuples(st.floats(0, 2000), st.integers(1, 5)), max_size=50))
def test_histograms_count_right(observations: list[tuple[float, int]]) -> None:
    bounds = (0.5, 1, 10, 100, 1000)
    histogram = Histogram(bounds)
    for number, count in observations:
        histogram.observe(number, count)
    all_numbers = [number for number, count in observations for _ in range(count)]
    expected = [(str(float(bound)), sum(number <= bound for number in all_numbers)) for bound in bounds]
    assert histogram.buckets() == [*expected, ("+Inf", len(all_numbers))]
    assert histogram.count == len(all_numbers)
    assert histogram.sum == pytest.approx(sum(all_numbers))


@pytest.mark.parametrize("bounds", [(), (1, 1), (2, 1)])
def test_wrong_bounds_are_refused(bounds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        Histogram(bounds)


def test_scrapes_while_reports_come() -> None:
    metrics = EngineMetrics()
    stop = threading.Event()

    def report() -> None:
        while not stop.is_set():
            metrics.on_tokens(0.01, 2)
            metrics.on_step(5, SchedulerStats(num_running=1))

    thread = threading.Thread(target=report)
    thread.start()
    try:
        counts = [value(metrics, "quire:inter_token_latency_seconds_count") for _ in range(30)]
    finally:
        stop.set()
        thread.join()
    assert counts == sorted(counts)


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL))
def test_the_readme_example_runs(block: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", block + "\nimport sys; assert 'torch' not in sys.modules"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert 'quire:num_requests_running{model_name="demo"} 1.0' in done.stdout


def test_compile_times_of_grammars_are_the_engine_s_counts() -> None:
    metrics = EngineMetrics(labels={"model_name": "m"})
    assert not any(name.startswith("quire:grammar_compile_seconds") for name, _ in samples(metrics))
    counts = [0] * (len(GRAMMAR_COMPILE_BOUNDS_S) + 1)
    counts[2], counts[-1] = 3, 1
    stats = SchedulerStats(
        num_grammar_queries_total=9,
        num_grammar_hits_total=5,
        num_grammar_failures_total=1,
        grammar_compile_counts_total=counts,
        grammar_compile_seconds_total=12.5,
    )
    metrics.on_step(0, stats)
    name = "quire:grammar_compile_seconds"
    assert value(metrics, f"{name}_bucket", model_name="m", le=str(GRAMMAR_COMPILE_BOUNDS_S[1])) == 0
    assert value(metrics, f"{name}_bucket", model_name="m", le=str(GRAMMAR_COMPILE_BOUNDS_S[2])) == 3
    assert value(metrics, f"{name}_bucket", model_name="m", le="+Inf") == 4
    assert value(metrics, f"{name}_sum", model_name="m") == 12.5
    assert value(metrics, "quire:grammar_cache_hits_total", model_name="m") == 5


def test_several_engines_are_told_apart_by_a_label_and_stand_together() -> None:
    metrics = EngineMetrics()
    assert metrics.of_engine(2) is metrics
    other = metrics.of_engine(3)
    assert metrics.of_engine(3) is other is not metrics
    metrics.set_labels(model_name="m", engine="2")
    metrics.on_step(5, SchedulerStats(num_running=1, kv_cache_usage=0.5, num_generation_tokens_total=7))
    other.on_step(3, SchedulerStats(num_running=2, kv_cache_usage=0.1, num_generation_tokens_total=4))
    other.on_finished(request(), FinishReason.STOP)
    third = metrics.of_engine(4)
    third.on_restart("SIGKILL")
    text = metrics.exposition().decode()
    lines = text.splitlines()
    samples = [line for line in lines if line.startswith("quire:num_requests_running{")]
    assert samples == [
        'quire:num_requests_running{engine="2",model_name="m"} 1.0',
        'quire:num_requests_running{engine="3",model_name="m"} 2.0',
        'quire:num_requests_running{engine="4",model_name="m"} 0.0',
    ]
    assert text.count("# HELP quire:num_requests_running ") == 1
    assert 'quire:engine_restarts_total{engine="4",model_name="m",reason="SIGKILL"} 1.0' in lines
    assert metrics.stats.num_running == 3
    assert metrics.stats.kv_cache_usage == pytest.approx(0.2)
    assert metrics.stats.num_generation_tokens_total == 11
    assert metrics.num_finished == 1


def test_tenants_are_counted_and_requests_without_one_are_not() -> None:
    metrics, heard = EngineMetrics(), []
    metrics.on_request_end = heard.append
    ended = [request(tenant="a"), request(tenant="b"), request(tenant="a", num_generation_tokens=1), request(tenant="")]
    for number, each in enumerate(ended):
        metrics.of_engine(0 if number != 1 else 1).on_finished(each, FinishReason.LENGTH)
    assert heard == ended
    lines = metrics.exposition().decode().splitlines()
    assert [line for line in lines if line.startswith("quire:tenant_") and "_created" not in line] == [
        'quire:tenant_requests_total{tenant="a"} 2.0',
        'quire:tenant_requests_total{engine="1",tenant="b"} 1.0',
        'quire:tenant_prompt_tokens_total{tenant="a"} 22.0',
        'quire:tenant_prompt_tokens_total{engine="1",tenant="b"} 11.0',
        'quire:tenant_cached_tokens_total{tenant="a"} 6.0',
        'quire:tenant_cached_tokens_total{engine="1",tenant="b"} 3.0',
        'quire:tenant_generation_tokens_total{tenant="a"} 6.0',
        'quire:tenant_generation_tokens_total{engine="1",tenant="b"} 5.0',
    ]
