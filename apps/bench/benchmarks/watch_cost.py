"""What watching the engine costs: processor time of the engine's thread, of watched steps and of others.

    python apps/bench/benchmarks/watch_cost.py [--model FOLDER] [--batch 1 8 32] [--steps 400] [--rounds 10]

Needs `quire`; without --model it runs the embedded demo model. Steps of the same requests are watched and unwatched by
turns, a few at a time, so that what else the machine does meets both alike; of both the quicker three quarters are
averaged. Reports are fetched and encoded as a client's calls have it, and timed apart: `reports` is their share of the
time at one every 0.2 s. `noise` is what the two halves of the unwatched steps differ by. Figures are of
`time.thread_time`, which counts what the thread computes and not what it waits for.
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import msgspec

from quire import LLM, SamplingParams
from quire_engine.watch import WatchedScheduler
from quire_interfaces.engine_watch import WatchCursor

PROMPT_TOKENS = 16
INTERVAL_S = 0.2
TURN = 8
"""Steps of a turn."""
KEPT = 0.75


class Turns:
    """Runs the steps of an engine watched and unwatched by turns.

    Args:
        llm: Has the engine.
    """

    def __init__(self, llm: LLM) -> None:
        self._core: Any = llm.engine.core  # whose step is replaced for the time of the measurement
        self._step = self._core.step
        self._plain = self._core._scheduler
        self._watch = self._core.watch()
        self._watched = WatchedScheduler(self._plain, self._watch)
        self._core.step = self._timed_step
        self._cursor = WatchCursor()
        self._next_s = 0.0
        self._number = 0
        self.times_us: list[list[float]] = [[], [], []]
        """Of unwatched steps, watched ones, and unwatched ones again."""
        self.report_us: list[float] = []

    def _timed_step(self) -> object:
        turn = self._number // TURN % 4
        self._number += 1
        is_watched = turn in (1, 3)
        self._core._scheduler = self._watched if is_watched else self._plain
        start = time.thread_time_ns()
        result = self._step()
        self.times_us[1 if is_watched else turn].append((time.thread_time_ns() - start) / 1e3)
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + INTERVAL_S
            start = time.thread_time_ns()
            report = self._watch.report("benchmark", self._cursor)
            msgspec.msgpack.encode(report)
            if not report.is_anew:
                self.report_us.append((time.thread_time_ns() - start) / 1e3)
            self._cursor = report.cursor
        return result

    def end(self) -> None:
        """Leave the engine as it was."""
        self._core.step = self._step
        self._core._scheduler = self._plain


def typical(times: list[float]) -> float:
    """Mean of the quicker ones. Raises SystemExit where there are none."""
    if not times:
        raise SystemExit("no step of one kind was measured: give more --steps or --rounds")
    quicker = sorted(times)[: max(1, int(len(times) * KEPT))]
    return sum(quicker) / len(quicker)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="checkpoint folder; the embedded demo model without it")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=400, help="tokens per request")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=args.steps, ignore_eos=True)
    with LLM(args.model, async_scheduling=False, num_threads=1) as llm:
        print(f"{'batch':>5} {'unwatched us':>12} {'watched us':>10} {'a step':>7} {'noise':>7} {'reports':>8}")
        for batch in args.batch:
            prompts = [{"prompt_token_ids": [10 + (i + j) % 200 for j in range(PROMPT_TOKENS)]} for i in range(batch)]
            llm.generate(prompts, params, use_tqdm=False)
            gc.collect()
            gc.freeze()
            turns = Turns(llm)
            for _ in range(args.rounds):
                llm.generate(prompts, params, use_tqdm=False)
            turns.end()
            first, watched, second = map(typical, turns.times_us)
            plain = typical(turns.times_us[0] + turns.times_us[2])
            reports = typical(turns.report_us) / (INTERVAL_S * 1e6)
            shares = f"{watched / plain - 1:>7.2%} {abs(first / second - 1):>7.2%} {reports:>8.2%}"
            print(f"{batch:>5} {plain:>12.1f} {watched:>10.1f} {shares}", flush=True)


if __name__ == "__main__":
    main()
