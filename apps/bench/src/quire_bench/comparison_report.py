"""How `quire bench peers` is shown: a table per situation for people, everything as JSON for programs."""

from __future__ import annotations

import sys
from typing import Any

from quire_bench.comparison import AnySituation, Comparison
from quire_bench.comparison_setup import ComparisonPlan
from quire_bench.limits import MachineLimits
from quire_bench.peers import OURS
from quire_bench.report import write_json

__all__ = ["comparison_figures", "comparison_text", "show_comparison"]


def show_comparison(result: Comparison, plan: ComparisonPlan, json_path: str | None) -> None:
    """Print the tables; write the JSON when a path is given ("-" for standard output).

    Raises:
        ConfigError: the file cannot be written.
    """
    print(comparison_text(result, plan), file=sys.stderr if json_path == "-" else sys.stdout)
    if json_path is not None:
        write_json(comparison_figures(result, plan), json_path)


def comparison_figures(result: Comparison, plan: ComparisonPlan) -> dict[str, Any]:
    """Everything that was measured, in tokens per second, seconds and bytes."""
    machine = MachineLimits.median(result.machine)
    return {
        "benchmark": "peers",
        "settings": plan.arguments,
        "model": plan.model,
        "architecture": plan.architecture,
        "dtype": plan.dtype,
        "machine": {
            "read_bytes_per_s": machine.read_bytes_per_s,
            "matmul_flop_per_s": machine.matmul_flop_per_s,
        },
        "engines": {
            engine.name: {
                "version": result.versions.get(engine.name),
                "file": engine.file,
                "weight_bytes": plan.work[engine.name].weight_bytes,
                "failures": result.failures.get(engine.name, {}),
            }
            for engine in plan.engines
        },
        "missing": plan.missing,
        "situations": {
            situation.name: {name: _row(result, plan, situation, name, machine) for name in result.engines}
            for situation in result.situations
        },
    }


def _row(
    result: Comparison, plan: ComparisonPlan, situation: AnySituation, name: str, machine: MachineLimits
) -> dict[str, Any]:
    middle, limit = result.median(situation.name, name), situation.limit(machine, plan.work[name])
    return {
        "median": middle,
        "ratio_us_to_peer": None if name == OURS else result.ratio(situation.name, name),
        "limit": limit,
        "of_limit": None if middle is None or limit is None else middle / limit,
        "rounds": result.figures[situation.name][name],
    }


def comparison_text(result: Comparison, plan: ComparisonPlan) -> str:
    """The tables."""
    figures = comparison_figures(result, plan)
    machine = figures["machine"]
    count = plan.settings["num_threads"]
    threads = f"{count or 'all'} thread{'' if count == 1 else 's'}"
    rounds = f"medians of {len(result.machine)} rounds" if len(result.machine) > 1 else "one round"
    lines = [
        f"{plan.model}: {plan.architecture}, {plan.dtype}, {threads}; {rounds}",
        f"this machine: reads {machine['read_bytes_per_s'] / 1e9:.1f} GB/s, "
        f"multiplies {machine['matmul_flop_per_s'] / 1e12:.3f} TFLOP/s in {plan.dtype}",
    ]
    for situation in result.situations:
        lines += ["", situation.title]
        lines.append(f"  {'':<16}{'median':>10}{'us/peer':>10}{'limit':>10}{'of limit':>10}")
        lines += [_line(situation, name, row) for name, row in figures["situations"][situation.name].items()]
    notes = [
        f"  {name}, {what}: {text}" for name, failures in result.failures.items() for what, text in failures.items()
    ]
    if notes:
        lines += ["", "failed:", *notes]
    if plan.missing:
        lines += ["", "not measured:", *(f"  {name}: {text}" for name, text in plan.missing.items())]
    return "\n".join(lines)


def _line(situation: AnySituation, name: str, row: dict[str, Any]) -> str:
    scale = 1e-9 if situation.kind == "memory" else 1.0
    ratio, share = row["ratio_us_to_peer"], row["of_limit"]
    cells = (
        _number(row["median"], scale),
        "" if ratio is None else f"{ratio:.2f}",
        "" if row["limit"] is None else _number(row["limit"], scale),
        "" if share is None else f"{share:.0%}",
    )
    return f"  {name:<16}" + "".join(f"{cell:>10}" for cell in cells).rstrip()


def _number(value: float | None, scale: float) -> str:
    if value is None:
        return "-"
    value *= scale
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
