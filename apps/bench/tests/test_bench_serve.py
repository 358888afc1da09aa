"""Load on a real server: every request counted, exact lengths, bounded in concurrency and rate."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire_bench import Workload, random_requests
from quire_bench.serve import ServeLoad, run_serve, summarize
from quire_interfaces import ConfigError, QuireError


def measure(load: ServeLoad, **workload: Any) -> dict[str, Any]:
    return summarize(*asyncio.run(run_serve(load, random_requests(Workload(**workload), low=10, high=250))))


def test_every_request_gets_its_tokens(fake_server: str) -> None:
    workload = Workload(num_requests=30, input_len=40, output_len=10, length_spread=0.5, prefix_len=16)
    requests, done = random_requests(workload, low=10, high=250), []
    load = ServeLoad(base_url=fake_server + "/v1/", max_concurrency=8)
    timings, wall_s = asyncio.run(run_serve(load, requests, lambda: done.append(1)))
    assert len(done) == 30
    for request, timing in zip(requests, timings, strict=True):
        assert timing.error is None
        assert timing.num_output_tokens == request.output_len
        assert timing.num_input_tokens == len(request.prompt_token_ids)
        assert timing.first_token_s is not None
        assert timing.total_s is not None
        assert 0 < timing.first_token_s <= timing.total_s <= wall_s + 0.001
        assert timing.first_token_s + sum(timing.gaps_s) <= timing.total_s + 0.001
    figures = summarize(timings, wall_s)
    assert figures["num_failed"] == figures["num_other_length"] == 0
    assert figures["most_common_failure"] is None
    assert figures["output_tokens"] == sum(request.output_len for request in requests)
    assert figures["output_tokens_per_s"] == pytest.approx(figures["output_tokens"] / wall_s)
    for name in ("time_to_first_token_s", "inter_token_latency_s", "time_per_output_token_s", "end_to_end_s"):
        row = figures[name]
        assert 0 <= row["p50"] <= row["p90"] <= row["p99"] <= row["max"]


def test_requests_arrive_at_their_rate(fake_server: str) -> None:
    figures = measure(
        ServeLoad(base_url=fake_server, request_rate=25, seed=3), num_requests=20, input_len=8, output_len=2
    )
    chooser = random.Random(3)
    last_arrival = sum(chooser.expovariate(25) for _ in range(19))
    assert figures["num_failed"] == 0
    assert figures["duration_s"] >= last_arrival


def test_the_command_writes_json(
    fake_server: str, quire: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--num-prompts", 5, "--input-len", 9, "--output-len", 4)
    assert (
        quire("bench", "serve", "--base-url", fake_server, *sizes, "--api-key", "sk-secret", "--output-json", "-") == 0
    )
    out, err = capsys.readouterr()
    figures = json.loads(out)
    assert figures["benchmark"] == "serve"
    assert figures["output_tokens"] == 20
    assert figures["settings"]["num_prompts"] == 5
    assert "sk-secret" not in out + err
    assert "time_to_first_token_ms" in err


def test_refused_requests_are_counted(
    fake_server: str, quire: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    # 505 + 30 tokens do not fit the 512 of the model; shorter ones do.
    sizes = ("--num-prompts", 6, "--input-len", 490, "--output-len", 20, "--length-spread", 0.04)
    assert quire("bench", "serve", "--base-url", fake_server, *sizes, "--output-json", path) == 1
    figures = json.loads(path.read_text())
    assert 0 < figures["num_failed"] < 6
    assert figures["most_common_failure"].startswith("HTTP 400: ")
    assert "num_failed" in capsys.readouterr().out


def test_an_unknown_model_fails_every_request(fake_server: str, quire: Callable[..., int]) -> None:
    assert quire("bench", "serve", "--base-url", fake_server, "--model", "gpt-7", "--num-prompts", 2) == 1
    figures = measure(ServeLoad(base_url=fake_server, model="gpt-7"), num_requests=2)
    assert figures["num_failed"] == 2
    assert figures["most_common_failure"].startswith("HTTP 404: ")
    assert figures["end_to_end_s"] == {}


def test_nothing_answers(free_port: int, quire: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port}"
    with pytest.raises(QuireError, match=r"no OpenAI-compatible server answers at .* start one with `quire serve`"):
        quire("bench", "serve", "--base-url", url)
    assert quire("bench", "serve", "--base-url", url, "--model", "m", "--num-prompts", 3, "--output-json", "-") == 1
    figures = json.loads(capsys.readouterr().out)
    assert figures["num_failed"] == figures["num_requests"] == 3
    assert "Cannot connect" in figures["most_common_failure"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("base_url", "127.0.0.1:8000"),
        ("max_concurrency", 0),
        ("request_rate", 0.0),
        ("request_rate", float("nan")),
        ("timeout_s", -1.0),
    ],
)
def test_bad_loads_are_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be") as caught:
        ServeLoad(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
