"""Host cost of a decode step: `schedule()` and `update()` for many running requests, prefix caching on.

    python packages/scheduler/benchmarks/host_cost.py [--num-seqs 64 256 1024 4096] [--depth 0 1]

Prints the median and the tenth percentile of the thread's CPU time in milliseconds (time of day would count what else
the machine does; where that makes memory slow too, the tenth percentile is nearer the truth). Needs quire-kv-cache. The
runner's part is a list of made-up tokens, built outside the measured time.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import deque

from quire_interfaces import FullAttentionSpec, ModelRunnerOutput, Request, SamplingParams, SchedulerOutput
from quire_kv_cache import KVCacheConfig, KVCacheManager, plan_kv_cache
from quire_scheduler import Scheduler, SchedulerConfig

PREFILL_TOKENS = 2048
"""Tokens of prompts that fit into a step beside one token of each request."""


def make_scheduler(num_seqs: int, num_prompt: int, num_steps: int) -> Scheduler:
    """A scheduler with `num_seqs` requests in its queue, and a cache that holds them all."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_dim=1, dtype="bfloat16")
    # The first requests decode while the last prompts are computed, and must not end before those.
    num_prefill_steps = -(-num_seqs * (num_prompt + 16) // PREFILL_TOKENS) + 2
    max_tokens = num_steps + num_prefill_steps
    num_blocks = 1 + num_seqs * (-(-(num_prompt + max_tokens) // 16) + 1)
    cache = KVCacheManager(plan_kv_cache({"layer": spec}, num_blocks=num_blocks), KVCacheConfig())
    config = SchedulerConfig(
        max_num_seqs=num_seqs, max_num_batched_tokens=PREFILL_TOKENS + num_seqs, max_queued_requests=num_seqs
    )
    scheduler = Scheduler(config, cache)
    for i in range(num_seqs):
        # Different lengths, so that block borders do not all fall into the same step.
        prompt = [1000 * i + j for j in range(num_prompt + i % 16)]
        params = SamplingParams(max_tokens=max_tokens)
        scheduler.add_request(
            Request(
                request_id=f"request-{i}",
                prompt_token_ids=prompt,
                sampling_params=params,
                seed=i,
                stop_token_ids=frozenset({2}),
                max_tokens=max_tokens,
            )
        )
    return scheduler


def result_of(output: SchedulerOutput) -> ModelRunnerOutput:
    """A token for each entry that samples."""
    tokens = [[7] if samples else [] for samples in output.samples]
    return ModelRunnerOutput(step_id=output.step_id, sampled_token_ids=tokens)


def measure(num_seqs: int, num_prompt: int, num_steps: int, depth: int) -> list[float]:
    """Seconds of CPU time per step in which all requests decode."""
    scheduler = make_scheduler(num_seqs, num_prompt, num_steps)
    flying: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
    times_s: list[float] = []
    gc.freeze()
    while len(times_s) < num_steps:
        start_s = time.thread_time()
        output = scheduler.schedule()
        middle_s = time.thread_time()
        assert output is not None
        flying.append((output, result_of(output)))
        if len(flying) <= depth:
            continue
        landing = flying.popleft()
        update_start_s = time.thread_time()
        scheduler.update(*landing)
        end_s = time.thread_time()
        if output.total_num_scheduled_tokens == num_seqs == len(output.rows):
            times_s.append(middle_s - start_s + end_s - update_start_s)
    return times_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--num-prompt-tokens", type=int, default=512)
    parser.add_argument("--num-steps", type=int, default=300)
    parser.add_argument("--depth", type=int, nargs="+", default=[0, 1], help="steps in flight when the next is planned")
    args = parser.parse_args()
    for num_seqs in args.num_seqs:
        for depth in args.depth:
            times_s = sorted(measure(num_seqs, args.num_prompt_tokens, args.num_steps, depth))
            median_ms, p10_ms = (1e3 * times_s[int(len(times_s) * q)] for q in (0.5, 0.1))
            print(f"{num_seqs} decodes, depth {depth}: median {median_ms:.3f} ms, p10 {p10_ms:.3f} ms per step")


if __name__ == "__main__":
    main()
