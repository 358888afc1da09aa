"""How `quire tune` shows what it tries and finds."""

from __future__ import annotations

from pathlib import Path

from quire.config import QuireConfig
from quire.kernel_list import list_problems, tune_kernels

__all__ = ["print_problems", "print_tuning"]


def print_problems(config: QuireConfig, target: str) -> int:
    """Print what would be tuned on a kind of GPU, which need not be here."""
    problems = list_problems(config, target)
    for problem, num_candidates in problems:
        print(f"{num_candidates:3d} configurations of {problem}")
    print(f"{len(problems)} problems, {sum(number for _, number in problems)} configurations on {target}")
    print(f"each starts from what a model of the limits of {target} says; what is fastest is measured on one (--out)")
    return 0


def print_tuning(config: QuireConfig, folder: str, *, context: int, num_processes: int | None) -> int:
    """Tune on the GPU of this machine, and print each problem as it is done."""
    tuning = tune_kernels(config, Path(folder), context=context, num_processes=num_processes)
    for number, (line, num_problems) in enumerate(tuning, 1):
        print(f"[{number}/{num_problems}] {line}", flush=True)
    print(f"the table is in {folder}: quire serve --kernel-tables {folder}")
    return 0
