"""Throughput, latency and the comparison with Transformers, on a tiny model that really runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM
from quire_bench import BenchRequest, Workload, random_requests
from quire_bench.offline import compare_throughput, measure_latency, measure_throughput, run_once
from quire_bench.peer_process import load_peer
from quire_bench.peers import PEERS
from quire_interfaces import ConfigError, ContextLengthError

MIXED = random_requests(Workload(num_requests=5, input_len=12, output_len=6, length_spread=0.5), low=10, high=250)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, max_model_len=32, max_num_seqs=4) as llm:
        yield llm


def test_throughput(llm: LLM) -> None:
    runs: list[int] = []
    figures = measure_throughput(llm, MIXED, repeats=3, on_run=lambda: runs.append(1))
    assert len(runs) == 3
    assert figures["num_requests"] == 5
    assert figures["input_tokens"] == sum(len(request.prompt_token_ids) for request in MIXED)
    assert figures["output_tokens"] == sum(request.output_len for request in MIXED)
    rates = figures["runs_output_tokens_per_s"]
    assert len(rates) == 3
    assert figures["output_tokens_per_s"] == pytest.approx(sorted(rates)[1], abs=0.01)
    both = figures["input_tokens"] + figures["output_tokens"]
    assert figures["total_tokens_per_s"] / both == pytest.approx(figures["requests_per_s"] / 5)


def test_each_run_starts_with_an_empty_prefix_cache(llm: LLM) -> None:
    requests = random_requests(Workload(num_requests=1, input_len=24, output_len=2), low=10, high=250)
    run_once(llm, requests)
    before = llm.stats().prefix_cache_hit_tokens_total
    run_once(llm, requests)
    assert llm.stats().prefix_cache_hit_tokens_total == before
    llm.generate([requests[0].prompt_token_ids], use_tqdm=False)
    assert llm.stats().prefix_cache_hit_tokens_total > before, "otherwise this test could not fail"


def test_latency(llm: LLM) -> None:
    runs: list[int] = []
    figures = measure_latency(llm, MIXED, repeats=2, warmups=1, on_run=lambda: runs.append(1))
    assert len(runs) == 3
    assert figures["batch_size"] == 5
    steps = max(request.output_len for request in MIXED)
    assert figures["per_output_token_s"]["max"] == pytest.approx(figures["end_to_end_s"]["max"] / steps)
    assert 0 < figures["end_to_end_s"]["p50"] <= figures["end_to_end_s"]["max"]


def test_the_smallest_request(llm: LLM) -> None:
    assert measure_throughput(llm, [BenchRequest([11], 1)], repeats=1)["output_tokens"] == 1


def test_a_request_that_does_not_fit_is_refused(llm: LLM) -> None:
    with pytest.raises(ContextLengthError):
        measure_throughput(llm, [BenchRequest([11] * 40, 1)], repeats=1)


def test_counts_are_checked(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="repeats must be at least 1, got 0"):
        measure_throughput(llm, MIXED, repeats=0)
    with pytest.raises(ConfigError, match="repeats must be at least 1, got -1"):
        measure_latency(llm, MIXED, repeats=-1, warmups=0)
    with pytest.raises(ConfigError, match="warmups must be at least 0, got -1"):
        measure_latency(llm, MIXED, repeats=1, warmups=-1)


def test_both_engines_in_turn(llm: LLM, tiny_model: Path) -> None:
    runs: list[int] = []
    with load_peer("transformers", tiny_model, MIXED, dtype=llm.dtype, num_threads=None, batch_size=2) as peer:
        figures = compare_throughput(llm, peer, MIXED, repeats=2, on_run=lambda: runs.append(1))
    assert len(runs) == len(figures["ratios"]) == 2
    assert figures["transformers_output_tokens_per_s"] > 0
    assert min(figures["ratios"]) - 0.001 <= figures["ratio"] <= max(figures["ratios"]) + 0.001
    with pytest.raises(ConfigError, match="repeats must be at least 1"):
        compare_throughput(llm, peer, MIXED, repeats=0)


def test_unknown_peers_and_bad_batches(tiny_model: Path) -> None:
    settings = {"dtype": "float32", "num_threads": None}
    with pytest.raises(ConfigError, match=r"peer must be one of transformers, .*, got 'abacus'"):
        load_peer("abacus", tiny_model, MIXED, batch_size=1, **settings)  # type: ignore[arg-type]
    for name in PEERS:
        with pytest.raises(ConfigError, match="batch size must be at least 1, got 0"):
            load_peer(name, tiny_model, MIXED, batch_size=0, **settings)  # type: ignore[arg-type]
