"""What loading adapters does to requests that are running: the time from one token to the next, with and without.

    python apps/bench/benchmarks/adapters_load_under_traffic.py [--model FOLDER] [--batch 8] [--rank 16]

Needs `quire` with compiled kernels; without --model it runs the embedded demo model; --dummy fills any checkpoint's
config.json with random weights. Requests decode all the time. Turn by turn, in rounds of so many steps each, either
nothing else happens but a short request now and then for an adapter that is there; or the same, and each of these
requests is for an adapter that is read from its files beside the steps and put into a slot. Two times are taken of each
step. The clock's is what a reader sees, and has in it what other programs on the machine take. The processor time of
the thread that runs steps has not, nor its waiting for the interpreter: it is what filling slots costs. How sure the
answer is comes from resampling the pairs of rounds (bootstrap).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from random_adapters import write_adapter

from quire import LLM, RequestOptions, SamplingParams

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

    def round(self, *, loading: bool) -> list[tuple[float, float]]:
        """Seconds of each of the steps of a round: the clock's, and the processor's on this thread."""
        short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        times: list[tuple[float, float]] = []
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
                self.llm.engine.add_request([5, 6, 7], short, RequestOptions(adapter="changing"))
            elif not loading and step % self.args.every == 0:
                self.llm.engine.add_request([5, 6, 7], short, RequestOptions(adapter="resident"))
            begin, own = time.perf_counter(), time.thread_time()
            self.llm.engine.step()
            times.append((time.perf_counter() - begin, time.thread_time() - own))
        if reading is not None:
            reading.result()
        return times


Rounds = list[list[float]]
"""Seconds of the steps of each round."""


def pooled(rounds: Rounds) -> list[float]:
    """The steps of all rounds."""
    return [seconds for each in rounds for seconds in each]


def p99(rounds: Rounds) -> float:
    """Of the steps of some rounds, in seconds."""
    return statistics.quantiles(pooled(rounds), n=100, method="inclusive")[98]


def moved(without: Rounds, loading: Rounds) -> tuple[float, float, float]:
    """How far loading moves the p99, in steps, and from where to where it is in 90 % of the resampled runs."""
    step = statistics.median(pooled(without))
    chooser, found = random.Random(0), []
    for _ in range(200):
        chosen = chooser.choices(range(len(without)), k=len(without))
        found.append((p99([loading[i] for i in chosen]) - p99([without[i] for i in chosen])) / step)
    cuts = statistics.quantiles(found, n=20)
    return (p99(loading) - p99(without)) / step, cuts[0], cuts[-1]


def report(name: str, without: Rounds, loading: Rounds) -> float:
    """Print the table of one of the times; how far the p99 moves at most."""
    print(name)
    for column, rounds in (("without", without), ("loading", loading)):
        times = pooled(rounds)
        in_ms = [1e3 * value for value in (statistics.median(times), p99(rounds), max(times))]
        print(f"  {column:<9}median {in_ms[0]:8.2f} ms   p99 {in_ms[1]:8.2f} ms   worst {in_ms[2]:8.2f} ms")
    by, least, most = moved(without, loading)
    print(f"  p99 moved by {by:+.2f} steps, from {least:+.2f} to {most:+.2f} in 90 % of the resampled runs")
    return most


def main() -> int:
    """Print two tables; 1 where it is not shown that loading moves the p99 of the clock's time by less than a step."""
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
        found: dict[bool, list[list[tuple[float, float]]]] = {False: [], True: []}
        for _ in range(args.rounds):
            for loading, rounds in found.items():
                traffic.fill()
                rounds.append(traffic.round(loading=loading)[10:])
                while llm.engine.has_unfinished_requests():
                    llm.engine.step()
    print(f"{args.batch} requests, rank {args.rank}, {info.num_bytes / 1e6:.1f} MB an adapter, {llm.dtype}")
    print(f"{traffic.num_loads} adapters loaded in {args.rounds} rounds of {args.steps} steps")

    def of(which: int, loading: bool) -> Rounds:
        return [[times[which] for times in each] for each in found[loading]]

    report("processor time of the thread that runs steps", of(1, False), of(1, True))
    most = report("clock", of(0, False), of(0, True))
    met = most < 1 and traffic.num_loads > 0
    print("bar, less than 1 step of the clock: " + ("met" if met else "not shown by this run"))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
