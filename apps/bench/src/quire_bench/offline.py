"""`quire bench throughput` and `quire bench latency`: the engine in this process, without HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from quire_bench.report import percentiles
from quire_bench.workload import BenchRequest
from quire_interfaces import ConfigError, QuireError, SamplingParams

if TYPE_CHECKING:
    from quire import LLM

__all__ = ["Peer", "compare_throughput", "measure_latency", "measure_throughput", "run_once", "sampling_params"]

OnRun = Callable[[], object]
"""Called after each timed or warm-up run."""


class Peer(Protocol):
    """Another engine, loaded."""

    name: str

    def run(self, requests: Sequence[BenchRequest]) -> float:
        """Serve all requests, each with at least the tokens it asks for; the seconds it took."""


def sampling_params(requests: Sequence[BenchRequest]) -> list[SamplingParams]:
    """Greedy, with exactly the asked output lengths."""
    return [
        SamplingParams(temperature=0, max_tokens=request.output_len, ignore_eos=True, detokenize=False)
        for request in requests
    ]


def run_once(llm: LLM, requests: Sequence[BenchRequest]) -> float:
    """Seconds of one run over all requests, with an empty prefix cache.

    Raises:
        QuireError: a request did not get its tokens; a figure from such a run would be worth nothing.
    """
    prompts = [request.prompt_token_ids for request in requests]
    params = sampling_params(requests)
    llm.reset_prefix_cache()
    start = time.perf_counter()
    results = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    for request, result in zip(requests, results, strict=True):
        output = result.outputs[0]
        if len(output.token_ids) != request.output_len:
            raise QuireError(
                f"a request for {request.output_len} tokens ended with {len(output.token_ids)} "
                f"({output.finish_reason}); the run cannot be measured"
            )
    return seconds


def measure_throughput(
    llm: LLM, requests: Sequence[BenchRequest], *, repeats: int, on_run: OnRun = lambda: None
) -> dict[str, Any]:
    """Run all requests at once, `repeats` times after a short warm-up.

    Returns:
        Counts, the median rates in tokens per second, and the rate of each run.

    Raises:
        ConfigError: repeats below 1.
    """
    _check_count("repeats", repeats, least=1)
    run_once(llm, _short(requests))
    rates = []
    for _ in range(repeats):
        rates.append(_num_outputs(requests) / run_once(llm, requests))
        on_run()
    return _throughput_figures(requests, rates)


def compare_throughput(
    llm: LLM, peer: Peer, requests: Sequence[BenchRequest], *, repeats: int, on_run: OnRun = lambda: None
) -> dict[str, Any]:
    """`measure_throughput` of both engines in turn, so that a machine that gets slower does so for both.

    Returns:
        Our figures; the peer's median rate; the ratio of each pair of runs, and its median.

    Raises:
        ConfigError: repeats below 1.
    """
    _check_count("repeats", repeats, least=1)
    run_once(llm, _short(requests))
    peer.run(_short(requests))
    ours, theirs = [], []
    for _ in range(repeats):
        ours.append(_num_outputs(requests) / run_once(llm, requests))
        theirs.append(_num_outputs(requests) / peer.run(requests))
        on_run()
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    return {
        **_throughput_figures(requests, ours),
        f"{peer.name}_output_tokens_per_s": percentiles(theirs)["p50"],
        "ratio": percentiles(ratios)["p50"],
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def measure_latency(
    llm: LLM, requests: Sequence[BenchRequest], *, repeats: int, warmups: int, on_run: OnRun = lambda: None
) -> dict[str, Any]:
    """Time one batch from start to end, `repeats` times.

    Returns:
        Percentiles in seconds: of a whole run, and of a run divided by its steps (the longest output).

    Raises:
        ConfigError: repeats below 1, warmups below 0.
    """
    _check_count("repeats", repeats, least=1)
    _check_count("warmups", warmups, least=0)
    seconds = []
    for number in range(warmups + repeats):
        elapsed = run_once(llm, requests)
        if number >= warmups:
            seconds.append(elapsed)
        on_run()
    longest = max(request.output_len for request in requests)
    return {
        "batch_size": len(requests),
        "input_tokens": _num_inputs(requests),
        "output_tokens": _num_outputs(requests),
        "end_to_end_s": percentiles(seconds),
        "per_output_token_s": percentiles([value / longest for value in seconds]),
    }


def _throughput_figures(requests: Sequence[BenchRequest], rates: list[float]) -> dict[str, Any]:
    input_tokens, output_tokens = _num_inputs(requests), _num_outputs(requests)
    rate = percentiles(rates)["p50"]
    return {
        "num_requests": len(requests),
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "requests_per_s": rate * len(requests) / output_tokens,
        "output_tokens_per_s": rate,
        "total_tokens_per_s": rate * (input_tokens + output_tokens) / output_tokens,
        "runs_output_tokens_per_s": [round(value, 2) for value in rates],
    }


def _short(requests: Sequence[BenchRequest]) -> list[BenchRequest]:
    """Two requests that load what is loaded on first use and take next to no time."""
    return [BenchRequest(request.prompt_token_ids[:8], min(2, request.output_len)) for request in requests[:2]]


def _num_inputs(requests: Sequence[BenchRequest]) -> int:
    return sum(len(request.prompt_token_ids) for request in requests)


def _num_outputs(requests: Sequence[BenchRequest]) -> int:
    return sum(request.output_len for request in requests)


def _check_count(name: str, value: int, *, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}", field=name)
