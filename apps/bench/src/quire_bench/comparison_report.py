"""How `quire bench peers` is shown: a table per situation for people, everything as JSON for programs."""

from __future__ import annotations

import sys
from statistics import median
from typing import Any

from quire_bench.comparison import AnySituation, Comparison
from quire_bench.comparison_setup import ComparisonPlan
from quire_bench.limits import MachineLimits
from quire_bench.report import write_json

__all__ = ["comparison_figures", "comparison_text", "figure_text", "show_comparison"]


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
            situation.name: {name: _row(result, plan, situation, name) for name in result.engines}
            for situation in result.situations
        },
    }


def _row(result: Comparison, plan: ComparisonPlan, situation: AnySituation, name: str) -> dict[str, Any]:
    work = plan.work[name]
    limits = [limit for limit in result.limits(situation, name, work) if limit is not None]
    rates = sorted(rate for rates in result.rates.get(situation.name, {}).get(name, []) for rate in rates)
    is_ours = any(engine.name == name and engine.is_ours for engine in plan.engines)
    return {
        "median": result.median(situation.name, name),
        "ratio_us_to_peer": None if is_ours else result.ratio(situation.name, name),
        "limit": median(limits) if limits else None,
        "of_limit": result.of_limit(situation, name, work),
        "rate_p10": rates[len(rates) // 10] if rates else None,
        "rate_p90": rates[len(rates) * 9 // 10] if rates else None,
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
        rate = {"read": "GB/s read", "multiply": "TFLOP/s"}.get(situation.bound or "", "")
        lines.append(f"  {'':<16}{'median':>10}{'us/peer':>10}{'limit':>10}{'of limit':>10}{rate:>14}".rstrip())
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
    ratio, share, low, high = (row[key] for key in ("ratio_us_to_peer", "of_limit", "rate_p10", "rate_p90"))
    scale = 1e-9 if situation.bound == "read" else 1e-12
    cells = (
        figure_text(situation, row["median"]),
        "" if ratio is None else f"{ratio:.2f}",
        "" if row["limit"] is None else figure_text(situation, row["limit"]),
        "" if share is None else f"{share:.0%}",
    )
    spread = "" if low is None else f"{low * scale:.3g} to {high * scale:.3g}"
    return (f"  {name:<16}" + "".join(f"{cell:>10}" for cell in cells) + f"{spread:>14}").rstrip()


def figure_text(situation: AnySituation, figure: float | None) -> str:
    """A figure of a row in three digits, memory in GB; "-" for None."""
    return _number(figure, 1e-9 if situation.kind == "memory" else 1.0)


def _number(value: float | None, scale: float) -> str:
    if value is None:
        return "-"
    value *= scale
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
