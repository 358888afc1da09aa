"""What a decode step of the assembled engine is made of: compiled kernels, and the host's share around them.

    python apps/bench/benchmarks/step_cost.py [--model FOLDER] [--batch 1 32] [--temperature 0] [--steps 300]

Needs `quire` with compiled kernels; without --model it runs the embedded demo model. Every phase is timed in the same
steps; figures are microseconds. `kernels` is the time inside the compiled functions, the team of threads
included; the share of everything else is the last column. Times nest: runner = kernels + its own part.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch  # noqa: F401 (brings the OpenMP runtime that the kernels use)

from quire import LLM, SamplingParams
from quire_kernels_cpu.builds import library

PROMPT_TOKENS = 16
PHASES = ("schedule", "runner", "kernels", "update", "core", "step")


class Stopwatch:
    """Nanoseconds per phase of the step that is running."""

    def __init__(self) -> None:
        self.running: dict[str, int] = {}
        self.steps: list[dict[str, int]] = []

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self.running[phase] = self.running.get(phase, 0) + time.perf_counter_ns() - start

        return run

    def end_step(self) -> None:
        self.steps.append(self.running)
        self.running = {}


def watch_kernels(stopwatch: Stopwatch) -> None:
    """Puts the stopwatch around every compiled function. Before an engine is made: it may hold some of them."""
    loaded = library()
    for name, function in list(vars(loaded).items()):
        if name.startswith("quire_"):
            setattr(loaded, name, stopwatch.timed("kernels", function))


def watch(llm: LLM, stopwatch: Stopwatch) -> None:
    """Puts the stopwatch around every phase of `llm`."""
    core = llm.engine.core
    scheduler, executor = core._scheduler, core._executor
    scheduler.schedule = stopwatch.timed("schedule", scheduler.schedule)  # type: ignore[method-assign]
    scheduler.update = stopwatch.timed("update", scheduler.update)  # type: ignore[method-assign]
    executor.execute = stopwatch.timed("runner", executor.execute)  # type: ignore[method-assign]
    core.step = stopwatch.timed("core", core.step)  # type: ignore[method-assign]
    step = stopwatch.timed("step", llm.engine.step)

    def whole_step() -> Any:
        try:
            return step()
        finally:
            stopwatch.end_step()

    llm.engine.step = whole_step  # type: ignore[method-assign]


def measure(llm: LLM, stopwatch: Stopwatch, batch: int, num_steps: int, temperature: float) -> dict[str, float]:
    """Microseconds per phase in the steps in which all requests decode: medians over the quarter of quickest steps."""
    prompts = [{"prompt_token_ids": [10 + (i + j) % 200 for j in range(PROMPT_TOKENS)]} for i in range(batch)]
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=num_steps, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)
    stopwatch.steps.clear()
    gc.collect()
    gc.freeze()
    llm.generate(prompts, params, use_tqdm=False)
    steps = sorted(stopwatch.steps[num_steps // 10 : -2], key=lambda each: each["step"])
    steps = steps[: len(steps) // 4]  # other programs make steps longer, never shorter
    return {phase: statistics.median(each.get(phase, 0) for each in steps) / 1e3 for phase in PHASES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="checkpoint folder; the embedded demo model without it")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--steps", type=int, default=300, help="tokens per request")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    stopwatch = Stopwatch()
    watch_kernels(stopwatch)
    with LLM(args.model, async_scheduling=False, enable_prefix_caching=False) as llm:
        watch(llm, stopwatch)
        print(f"{'batch':>5} " + " ".join(f"{phase:>9}" for phase in PHASES) + f" {'host':>9} {'share':>7}")
        for batch in args.batch:
            typical = measure(llm, stopwatch, batch, args.steps, args.temperature)
            host = typical["step"] - typical["kernels"]
            cells = " ".join(f"{typical[phase]:>9.1f}" for phase in PHASES)
            print(f"{batch:>5} {cells} {host:>9.1f} {host / typical['step']:>7.1%}", flush=True)


if __name__ == "__main__":
    main()
