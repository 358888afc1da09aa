"""What the command `quire bench kernels` does with its arguments, and how its figures are shown."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

import torch

from quire_bench.kernel_cases import CASES
from quire_bench.kernel_plot import write_svg
from quire_bench.kernels import KernelFigure, KernelPlan, load_plan, make_plan, measure_plan, write_csv
from quire_bench.report import check_json_path, progress_bar, write_json
from quire_interfaces import ConfigError

__all__ = ["run_and_show"]


def run_and_show(args: argparse.Namespace) -> None:
    """Measure what the command line asks for, print it, write it.

    Raises:
        ConfigError: Something asked for cannot be.
    """
    check_json_path(args.output_json)
    for name in ("repeats", "num_threads"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}", field=name)
    plan = _plan(args)
    threads = torch.get_num_threads()
    if args.num_threads is not None:
        torch.set_num_threads(args.num_threads)
    try:
        with progress_bar() as progress:
            task = progress.add_task("limits", total=len(plan.runs) + 1)

            def tell(op: str) -> None:
                progress.update(task, description=op)
                progress.advance(task)

            rates, figures, left_out = measure_plan(plan, repeats=args.repeats, on_run=tell)
    finally:
        torch.set_num_threads(threads)
    machine = {"device": str(plan.device), "dtype": str(plan.dtype).removeprefix("torch."), **asdict(rates)}
    _print(figures, left_out, machine, sys.stderr if args.output_json == "-" else sys.stdout)
    if args.csv is not None:
        write_csv(figures, args.csv)
    if args.svg is not None:
        write_svg(figures, machine, args.svg)
    if args.output_json is not None:
        reasons = [{"backend": name, "reason": reason, "ops": ops} for (name, reason), ops in left_out.items()]
        shown = {"machine": machine, "figures": [asdict(one) for one in figures], "left_out": reasons}
        write_json({"benchmark": "kernels", **shown}, args.output_json)


def _plan(args: argparse.Namespace) -> KernelPlan:
    if args.plan is not None:
        for name in ("ops", "batch"):
            if getattr(args, name) is not None:
                raise ConfigError(f"--{name} goes without a plan; write it into the plan", field=name)
        return load_plan(args.plan, args.device)
    ops = list(CASES) if args.ops is None else [name.strip() for name in args.ops.split(",")]
    entries: list[dict[str, Any]] = [{"op": op} for op in ops]
    for entry in entries:
        if args.batch is not None and entry["op"] in CASES and "batch" in CASES[entry["op"]].defaults:
            entry["shapes"] = {"batch": [args.batch]}
    return make_plan(entries, args.dtype, args.device)


def _print(
    figures: list[KernelFigure], left_out: dict[tuple[str, str], list[str]], machine: dict[str, Any], file: Any
) -> None:
    read, product = machine["read_bytes_per_s"] / 1e9, machine["matmul_flop_per_s"] / 1e12
    print(f"kernels on {machine['device']} in {machine['dtype']}", file=file)
    print(f"  limits of this run: {read:.1f} GB/s read, {product:.3f} TFLOP/s of matrix products", file=file)
    print(f"  {'op':18s}{'backend':12s}{'us':>11s}{'limit us':>11s}{'of limit':>10s}{'GB/s':>9s}  shape", file=file)
    for one in figures:
        print(
            f"  {one.op:18s}{one.backend:12s}{1e6 * one.median_s:11.1f}{1e6 * one.limit_s:11.1f}"
            f"{100 * one.of_limit:9.0f}%{one.bytes_per_s / 1e9:9.1f}  {one.shape}",
            file=file,
        )
    for (name, reason), ops in left_out.items():
        print(f"  {name} is left out of {', '.join(ops)}: {reason}", file=file)
