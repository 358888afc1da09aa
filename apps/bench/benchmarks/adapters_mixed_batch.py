"""What adapters cost: decode steps of one batch with none, with one adapter for all, with several mixed.

    python apps/bench/benchmarks/adapters_mixed_batch.py [--model FOLDER] [--batch 32] [--rank 16] [--adapters 0 1 16]

Needs `quire` with compiled kernels; without --model it runs the embedded demo model; --dummy fills any checkpoint's
config.json with random weights. Adapters are random, of one rank, for every matrix. One engine serves all batches, turn
by turn, with one thread; a figure is the mean of the quickest quarter of its steps, in microseconds of the processor's
time, which other programs on the machine lengthen less than the clock's. With --merge-after, an adapter that is alone
moves into the weights, a matrix in each step; --skip leaves the first steps of every batch out, until it is there.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from random_adapters import write_adapter

from quire import LLM, RequestOptions, SamplingParams


def step_times_us(llm: LLM, batch: int, num_adapters: int, num_steps: int, skip: int) -> list[float]:
    """Of the steps in which all requests decode."""
    params = SamplingParams(temperature=0, max_tokens=num_steps, ignore_eos=True)
    for i in range(batch):
        adapter = f"a{i % num_adapters}" if num_adapters else None
        llm.engine.add_request([10 + (i + j) % 200 for j in range(16)], params, RequestOptions(adapter=adapter))
    times = []
    while llm.engine.has_unfinished_requests():
        begin = time.process_time_ns()
        llm.engine.step()
        times.append((time.process_time_ns() - begin) / 1000)
    return times[skip:-2]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model")
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 16])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--skip", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--merge-after", type=int, default=0, help="lora_merge_after")
    args = parser.parse_args()
    if args.steps - args.skip < 4:
        parser.error(f"--steps {args.steps} leaves nothing to count after --skip {args.skip}; give 4 more at least")
    llm = LLM(
        args.model, max_model_len=16 + args.steps, max_num_seqs=args.batch, enable_lora=True, num_threads=1,
        max_loras=max(*args.adapters, 1), max_lora_rank=args.rank, max_cpu_loras=max(*args.adapters, 1) + 2,
        load_format="dummy" if args.dummy else "auto", kv_cache_memory_bytes=1 << 29, enable_prefix_caching=False,
        lora_merge_after=args.merge_after,
    )  # fmt: skip
    with llm, tempfile.TemporaryDirectory() as folder:
        for i in range(max(args.adapters)):
            write_adapter(llm, Path(folder) / f"{i}", args.rank, i)
            info = llm.load_adapter(f"a{i}", f"{folder}/{i}")
        found: dict[int, list[float]] = {count: [] for count in args.adapters}
        for _ in range(args.rounds):
            for count, times in found.items():
                times += step_times_us(llm, args.batch, count, args.steps, args.skip)
        quickest = {count: statistics.mean(sorted(times)[: len(times) // 4]) for count, times in found.items()}
        print(f"{args.batch} requests, rank {args.rank}, {info.num_bytes / 1e6:.1f} MB an adapter, {llm.dtype}")
        base = quickest[args.adapters[0]]
        for count, step_us in quickest.items():
            print(f"{count:3d} adapters  {step_us:10.0f} us a step  {base / step_us - 1:+7.1%} throughput")


if __name__ == "__main__":
    main()
