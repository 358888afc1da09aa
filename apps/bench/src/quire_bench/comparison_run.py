"""`quire bench peers` as a command: what it says while it runs, what it keeps, and its exit status."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from quire_bench.comparison import AnySituation, Comparison, compare
from quire_bench.comparison_plot import write_plots
from quire_bench.comparison_report import comparison_figures, comparison_text, figure_text, show_comparison
from quire_bench.comparison_setup import ComparisonPlan, set_up
from quire_bench.limits import MachineProbe
from quire_bench.peers import OURS, PeerOptions
from quire_bench.report import check_json_path, write_json

__all__ = ["run_comparison"]


def run_comparison(args: argparse.Namespace, options: PeerOptions) -> int:
    """Run the command.

    Standard error gets a line before and after each measurement, and the tables as they are after each round but the
    last; the files are written after each round.

    Raises:
        ConfigError: arguments that cannot work, or a file that cannot be written.
        CheckpointError: a model that is missing or not understood.
    """
    # As an exit, it ends the engines, too: they run in process groups of their own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for path in (args.output_json, args.svg, args.html):
        check_json_path(path)
    start = time.monotonic()

    def tell(what: str) -> None:
        print(f"{time.monotonic() - start:6.0f} s  {what}", file=sys.stderr, flush=True)

    def tell_figure(situation: AnySituation, engine: str, figure: float) -> None:
        tell(f"    {engine}, {situation.name}: {figure_text(situation, figure)}")

    def keep(result: Comparison, plan: ComparisonPlan) -> None:
        if args.output_json not in (None, "-"):
            write_json(comparison_figures(result, plan), args.output_json)
        write_plots(result, plan, svg=args.svg, html=args.html)
        if len(result.machine) < args.repeats:
            print(f"\n{comparison_text(result, plan)}\n", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="quire-bench-") as scratch:
        plan = set_up(args, options, Path(scratch), tell)
        result = compare(
            plan.engines,
            plan.situations,
            plan.settings,
            repeats=args.repeats,
            timeout_s=args.timeout,
            open_probe=lambda: MachineProbe(plan.dtype, args.num_threads, timeout_s=args.timeout),
            one_at_a_time=args.one_at_a_time,
            on_progress=tell,
            on_figure=tell_figure,
            on_round=lambda result: keep(result, plan),
        )
    show_comparison(result, plan, args.output_json)
    return 1 if any(name.split()[0] == OURS for name in result.failures) else 0
