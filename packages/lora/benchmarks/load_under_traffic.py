"""What loading adapters does to requests that are running: the time from one token to the next, with and without.

    python packages/lora/benchmarks/load_under_traffic.py [--model FOLDER] [--batch 8] [--rank 16]

Needs `quire` with compiled kernels; without --model it runs the embedded demo model; --dummy fills any checkpoint's
config.json with random weights. Requests decode all the time. Turn by turn, in rounds of so many steps each, either
nothing else happens but a short request now and then for an adapter that is there; or the same, and each of these
requests is for an adapter that is read from its files beside the steps and put into a slot. Times are the clock's, for
that is what a reader sees: on a busy machine, compare the two columns, not one of them with anything else.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from random_adapters import write_adapter

from quire import LLM, SamplingParams

ADAPTERS = 4
"""Read again and again: more than one, so that each comes into a slot anew."""


class Traffic:
    """Requests that decode, and a short one now and then."""

    def __init__(self, llm: LLM, folders: list[Path], args: argparse.Namespace) -> None:
        self.llm, self.folders, self.args = llm, folders, args
        self.num_loads = 0

    def fill(self) -> None:
        """As many long requests as there should be."""
        params = SamplingParams(temperature=0, max_tokens=4 * self.args.steps, ignore_eos=True)
        for i in range(self.args.batch):
            self.llm.engine.add_request([10 + (i + j) % 200 for j in range(16)], params)

    def round(self, *, loading: bool) -> list[float]:
        """Seconds of each of the steps of a round."""
        short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        times: list[float] = []
        reading: Future[Any] | None = None
        for step in range(self.args.steps):
            if loading and reading is None:
                folder = self.folders[self.num_loads % ADAPTERS]
                reading = self.llm.engine.core.parts.adapters.load(  # type: ignore[union-attr]
                    "changing", str(folder), replace=True
                )
            if loading and reading is not None and reading.done():
                reading.result()
                self.num_loads += 1
                reading = None
                self.llm.engine.add_request([5, 6, 7], short, adapter="changing")
            elif not loading and step % self.args.every == 0:
                self.llm.engine.add_request([5, 6, 7], short, adapter="resident")
            begin = time.perf_counter()
            self.llm.engine.step()
            times.append(time.perf_counter() - begin)
        if reading is not None:
            reading.result()
        return times


def main() -> int:
    """Print a table; 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model")
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100, help="of a round")
    parser.add_argument(
        "--every", type=int, default=4, help="steps from one short request to the next, without loading"
    )
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    llm = LLM(
        args.model, max_model_len=32 + 4 * args.steps, max_num_seqs=args.batch + 4, enable_lora=True, num_threads=1,
        max_loras=3, max_lora_rank=args.rank, max_cpu_loras=2, enable_prefix_caching=False,
        load_format="dummy" if args.dummy else "auto", kv_cache_memory_bytes=1 << 29,
    )  # fmt: skip
    with llm, tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder) / str(i) for i in range(ADAPTERS)]
        for i, one in enumerate(folders):
            write_adapter(llm, one, args.rank, i)
        write_adapter(llm, Path(folder) / "resident", args.rank, ADAPTERS)
        info = llm.load_adapter("resident", f"{folder}/resident")
        traffic = Traffic(llm, folders, args)
        found: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(args.rounds):
            for loading, times in found.items():
                traffic.fill()
                times += traffic.round(loading=loading)[10:]
                while llm.engine.has_unfinished_requests():
                    llm.engine.step()
    print(f"{args.batch} requests, rank {args.rank}, {info.num_bytes / 1e6:.1f} MB an adapter, {llm.dtype}")
    print(f"{traffic.num_loads} adapters loaded in {len(found[True])} steps")
    p99 = {}
    for loading, times in found.items():
        cuts = statistics.quantiles(times, n=100)
        p99[loading] = cuts[98]
        name = "loading" if loading else "without"
        in_ms = [1e3 * value for value in (cuts[49], cuts[98], max(times))]
        print(f"{name:<9}median {in_ms[0]:8.2f} ms   p99 {in_ms[1]:8.2f} ms   worst {in_ms[2]:8.2f} ms")
    step = statistics.median(found[False])
    moved = (p99[True] - p99[False]) / step
    print(f"p99 moved by {moved:+.2f} steps (bar: less than 1)")
    return 0 if moved < 1 else 1


if __name__ == "__main__":
    sys.exit(main())
