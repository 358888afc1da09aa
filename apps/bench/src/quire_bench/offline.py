"""`quire bench throughput` and `quire bench latency`: the engine in this process, without HTTP."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from quire_interfaces import SamplingParams
from rich.progress import Progress

from quire_bench.report import percentiles
from quire_bench.workload import BenchRequest

if TYPE_CHECKING:
    from quire import LLM

__all__ = ["measure_latency", "measure_throughput", "sampling_params"]


def sampling_params(requests: list[BenchRequest]) -> list[SamplingParams]:
    """Greedy, with exactly the asked output lengths."""
    return [
        SamplingParams(temperature=0, max_tokens=request.output_len, ignore_eos=True, detokenize=False)
        for request in requests
    ]


def run_once(llm: LLM, requests: list[BenchRequest]) -> tuple[float, int]:
    """Seconds and generated tokens of one run over all requests."""
    prompts = [request.prompt_token_ids for request in requests]
    start = time.perf_counter()
    results = llm.generate(prompts, sampling_params(requests), use_tqdm=False)
    seconds = time.perf_counter() - start
    return seconds, sum(len(result.outputs[0].token_ids) for result in results)


def measure_throughput(llm: LLM, requests: list[BenchRequest], *, repeats: int, progress: Progress) -> dict[str, Any]:
    """Run all requests at once, `repeats` times after one short warm-up, with an empty prefix cache each time."""
    task = progress.add_task("throughput", total=repeats)
    run_once(llm, [BenchRequest(request.prompt_token_ids[:8], 2) for request in requests[:2]])
    rates, output_tokens = [], 0
    for _ in range(repeats):
        llm.reset_prefix_cache()
        seconds, output_tokens = run_once(llm, requests)
        rates.append(output_tokens / seconds)
        progress.advance(task)
    input_tokens = sum(len(request.prompt_token_ids) for request in requests)
    rate = percentiles(rates)["p50"]
    return {
        "num_requests": len(requests),
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "output_tokens_per_s": rate,
        "total_tokens_per_s": rate * (input_tokens + output_tokens) / output_tokens,
        "runs_output_tokens_per_s": [round(value, 2) for value in rates],
    }


def measure_latency(
    llm: LLM, requests: list[BenchRequest], *, repeats: int, warmups: int, progress: Progress
) -> dict[str, Any]:
    """Time one batch from start to end, `repeats` times."""
    task = progress.add_task("latency", total=repeats + warmups)
    seconds = []
    for number in range(repeats + warmups):
        llm.reset_prefix_cache()
        elapsed, _ = run_once(llm, requests)
        if number >= warmups:
            seconds.append(elapsed)
        progress.advance(task)
    return {
        "batch_size": len(requests),
        "end_to_end_s": percentiles(seconds),
        "per_output_token_s": percentiles([value / requests[0].output_len for value in seconds]),
    }
