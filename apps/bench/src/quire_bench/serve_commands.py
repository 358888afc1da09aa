"""`quire bench serve`, `sweep serve`, `sweep serve-sla`, `sweep plot-pareto` and `startup`, run."""

from __future__ import annotations

import argparse
import asyncio
import csv
import datetime
import json
import math
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire_bench.pareto import html_page, point_of, svg_plot, write_text
from quire_bench.report import check_json_path, progress_bar, show, write_json
from quire_bench.search import largest_load, misses, parse_limits
from quire_bench.serve import ServeLoad, ServeRequest, Timing, run_serve, summarize, wait_until_ready
from quire_bench.serving_flags import load_of, metadata_of, requests_of
from quire_bench.serving_results import METRICS, parse_goals, serving_results
from quire_bench.startup import measure_start, serve_command, startup_results
from quire_interfaces import ConfigError

__all__ = ["run_bench_serve", "run_plot_pareto", "run_startup", "run_sweep_serve", "run_sweep_sla"]

HIDDEN = ("run", "command", "kind", "sweep", "api_key", "output_json", "header")
"""Arguments that results do not repeat."""


class _Runs:
    """Runs of one command line, with other loads.

    Raises:
        ConfigError: a flag that cannot work.
        QuireError: no server is ready in time.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.load = load_of(args)
        self.metrics = _metrics(args.percentile_metrics)
        self.points = _points(args.metric_percentiles)
        self.goals = parse_goals(args.goodput)
        self.metadata = metadata_of(args)
        self.requests = requests_of(args)
        if args.num_warmups < 0:
            raise ConfigError(f"--num-warmups must not be negative, got {args.num_warmups}", field="num_warmups")
        if args.ready_check_timeout_sec > 0:
            waiting = f"waiting for {self.load.base_url}"
            with progress_bar() as progress:
                task = progress.add_task(waiting, total=None)
                asyncio.run(
                    wait_until_ready(self.load, args.ready_check_timeout_sec, lambda: progress.advance(task, 0))
                )
        if args.num_warmups:
            self._send(self.load, (self.requests * args.num_warmups)[: args.num_warmups], "warming up")

    def _send(self, load: ServeLoad, requests: Sequence[ServeRequest], what: str) -> tuple[list[Timing], float]:
        num_turns = sum(len(turns) if (turns := getattr(each, "turns", None)) is not None else 1 for each in requests)
        if self._args.disable_tqdm:
            return asyncio.run(run_serve(load, requests))
        with progress_bar() as progress:
            task = progress.add_task(what, total=num_turns)
            return asyncio.run(run_serve(load, requests, lambda: progress.advance(task)))

    def measure(self, load: ServeLoad, what: str = "requests") -> tuple[list[Timing], float]:
        """Send everything once."""
        return self._send(load, self.requests, what)

    def results(self, load: ServeLoad, timings: Sequence[Timing], wall_s: float, *, detailed: bool) -> dict[str, Any]:
        """Under vLLM's names, what was asked for first."""
        args = self._args
        rate = "inf" if load.request_rate is None or math.isinf(load.request_rate) else load.request_rate
        return {
            "date": datetime.datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"),
            "backend": load.backend,
            "endpoint_type": load.backend,
            "label": args.label,
            "model_id": load.model,
            "tokenizer_id": args.tokenizer,
            "num_prompts": args.num_prompts,
            **self.metadata,
            "request_rate": rate,
            "burstiness": load.burstiness,
            "max_concurrency": load.max_concurrency,
            **serving_results(
                timings, wall_s, points=self.points, metrics=self.metrics, goals=self.goals, detailed=detailed
            ),
        }


def _metrics(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in METRICS]
    if unknown or not names:
        raise ConfigError(f"--percentile-metrics takes {', '.join(METRICS)}, got {text!r}", field="percentile_metrics")
    return names


def _points(text: str) -> list[float]:
    points = _numbers(text, "--metric-percentiles")
    if any(not 0 <= point <= 100 for point in points):
        raise ConfigError(f"--metric-percentiles takes numbers from 0 to 100, got {text!r}", field="metric_percentiles")
    return points


def _numbers(text: str, flag: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or any(math.isnan(number) for number in numbers):
        raise ConfigError(f"{flag} takes numbers with commas between them, got {text!r}", field=flag.strip("-"))
    return numbers


def run_bench_serve(args: argparse.Namespace) -> int:
    """`quire bench serve`; exit status 1 when a request failed."""
    check_json_path(args.output_json)
    path = _result_path(args)
    runs = _Runs(args)
    timings, wall_s = runs.measure(runs.load)
    results = runs.results(runs.load, timings, wall_s, detailed=args.save_detailed)
    figures = summarize(timings, wall_s)
    if runs.goals:
        figures["request_goodput_per_s"] = results["request_goodput"]
    settings = {name: value for name, value in vars(args).items() if name not in HIDDEN}
    show("serve", figures, settings, args.output_json)
    if path is not None:
        write_json(results, str(path))
        print(f"results in {path}", file=sys.stderr)
    return 1 if figures["num_failed"] else 0


def _result_path(args: argparse.Namespace) -> Path | None:
    """Of --save-result; fails before the run.

    Raises:
        ConfigError: there is no such folder.
    """
    if not (args.save_result or args.save_detailed or args.result_filename):
        return None
    folder = Path(args.result_dir or ".").expanduser()
    if not folder.is_dir():
        raise ConfigError(f"--result-dir {folder} is no folder", field="result_dir")
    moment = datetime.datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    rate = "inf" if args.request_rate is None else f"{args.request_rate:g}"
    return folder / (args.result_filename or f"{args.label or args.backend}-{rate}qps-{moment}.json")


def _sweep_outputs(args: argparse.Namespace) -> None:
    check_json_path(args.output_json)
    for name in ("csv", "svg", "html"):
        path = getattr(args, name)
        if path is not None and not Path(path).expanduser().parent.is_dir():
            raise ConfigError(f"--{name} {path}: there is no such folder", field=name)


def _tell_sweep(args: argparse.Namespace, rows: list[dict[str, Any]], more: dict[str, Any] | None = None) -> None:
    """A table for people, and the files that were asked for."""
    file = sys.stderr if args.output_json == "-" else sys.stdout
    names = ["request_rate", "max_concurrency", "output_throughput", "completed", "failed"]
    names += [name for name in ("p99_ttft_ms", "p99_itl_ms", "p99_tpot_ms") if rows and name in rows[0]]
    print("  ".join(name.rjust(18) for name in names), file=file)
    for row in rows:
        shown = (f"{row[name]:.2f}" if isinstance(row[name], float) else str(row[name]) for name in names)
        print("  ".join(text.rjust(18) for text in shown), file=file)
    if args.csv is not None:
        try:
            with open(args.csv, "w", newline="", encoding="utf-8") as output:
                writer = csv.DictWriter(output, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        except OSError as error:
            raise ConfigError(f"--csv {args.csv}: cannot be written ({error.strerror})", field="csv") from None
    _draw(rows, args.svg, args.html, [args.label or ""] * len(rows))
    if args.output_json is not None:
        write_json({**(more or {}), "runs": rows}, args.output_json)


def _draw(rows: Sequence[dict[str, Any]], svg: str | None, html: str | None, series: Sequence[str]) -> None:
    points = [point_of(row, name) for row, name in zip(rows, series, strict=True)]
    if svg is not None:
        write_text(svg_plot(points), svg, "--svg")
    if html is not None:
        write_text(html_page(points, rows, "Throughput of each user and of all"), html, "--html")


def _loads(args: argparse.Namespace, load: ServeLoad) -> list[ServeLoad]:
    """Each rate with each concurrency.

    Raises:
        ConfigError: neither is given, or one cannot work.
    """
    if args.request_rates is None and args.max_concurrencies is None:
        raise ConfigError("a sweep needs --request-rates, --max-concurrencies, or both", field="request_rates")
    rates: list[float | None] = [load.request_rate]
    if args.request_rates is not None:
        rates = [*_numbers(args.request_rates, "--request-rates")]
    bounds = [load.max_concurrency if args.request_rates is None or args.max_concurrency is not None else None]
    if args.max_concurrencies is not None:
        numbers = _numbers(args.max_concurrencies, "--max-concurrencies")
        if any(number != int(number) for number in numbers):
            raise ConfigError("--max-concurrencies takes whole numbers", field="max_concurrencies")
        bounds = [int(number) for number in numbers]
    return [replace(load, request_rate=rate, max_concurrency=bound) for rate in rates for bound in bounds]


def _name(load: ServeLoad) -> str:
    rate = "" if load.request_rate is None or math.isinf(load.request_rate) else f"{load.request_rate:g} requests/s"
    bound = "" if load.max_concurrency is None else f"{load.max_concurrency} at once"
    return ", ".join(part for part in (rate, bound) if part) or "all at once"


def run_sweep_serve(args: argparse.Namespace) -> int:
    """`quire bench sweep serve`; exit status 1 when a request failed."""
    _sweep_outputs(args)
    if args.num_runs < 1:
        raise ConfigError(f"--num-runs must be at least 1, got {args.num_runs}", field="num_runs")
    loads = _loads(args, load_of(args))
    runs = _Runs(args)
    rows = []
    for load in loads:
        for number in range(args.num_runs):
            timings, wall_s = runs.measure(load, _name(load))
            rows.append({"run_number": number, **runs.results(load, timings, wall_s, detailed=False)})
    _tell_sweep(args, rows)
    return 1 if any(row["failed"] for row in rows) else 0


def run_sweep_sla(args: argparse.Namespace) -> int:
    """`quire bench sweep serve-sla`; exit status 1 where not even the lowest load keeps to the limits."""
    _sweep_outputs(args)
    limits = parse_limits(args.sla)
    is_rate = args.variable == "request-rate"
    # The figures that limits speak of, whatever else is asked for.
    points = sorted(
        {*_points(args.metric_percentiles), *(float(name[1:].split("_")[0]) for name in limits if name[0] == "p")}
    )
    args.metric_percentiles = ",".join(f"{point:g}" for point in points)
    args.percentile_metrics = ",".join(METRICS)
    runs = _Runs(args)
    rows: list[dict[str, Any]] = []

    def is_kept(value: float) -> bool:
        load = replace(runs.load, request_rate=value) if is_rate else replace(runs.load, max_concurrency=int(value))
        if is_rate and args.max_concurrency is None:
            load = replace(load, max_concurrency=None)
        timings, wall_s = runs.measure(load, _name(load))
        row = runs.results(load, timings, wall_s, detailed=False)
        missed = misses(row, limits)
        rows.append({**row, "sla_met": not missed})
        print(f"{_name(load)}: {'; '.join(missed) or 'kept'}", file=sys.stderr)
        return not missed

    low = args.min if is_rate else int(args.min)
    best = largest_load(is_kept, low=low, high=args.max, tolerance=args.tolerance, is_whole=not is_rate)
    found = {"variable": args.variable.replace("-", "_"), "largest": best, "sla": limits}
    _tell_sweep(args, rows, found)
    words = f"{args.variable} {best:g}" if best is not None else f"none: not even {low:g} keeps to the limits"
    print(f"largest load: {words}", file=sys.stderr if args.output_json == "-" else sys.stdout)
    return 0 if best is not None else 1


def run_plot_pareto(args: argparse.Namespace) -> int:
    """`quire bench sweep plot-pareto`."""
    if args.svg is None and args.html is None:
        raise ConfigError("give --svg FILE, --html FILE, or both", field="svg")
    rows: list[dict[str, Any]] = []
    series: list[str] = []
    for name in args.files:
        found = _rows_of(name)
        rows += found
        series += [str(row.get("label") or (Path(name).stem if len(args.files) > 1 else "")) for row in found]
    _draw(rows, args.svg, args.html, series)
    return 0


def _rows_of(name: str) -> list[dict[str, Any]]:
    """Figures of runs: a CSV or JSON file of a sweep, or the result of one run."""
    try:
        text = Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {name}: {getattr(error, 'strerror', None) or 'it is no text'}", field="files"
        ) from None
    if name.endswith(".csv"):
        return [dict(row) for row in csv.DictReader(text.splitlines())]
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is no JSON: {error}", field="files") from None
    rows = value.get("runs", [value]) if isinstance(value, dict) else value
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{name} holds no figures of runs", field="files")
    return rows


def run_startup(args: argparse.Namespace) -> int:
    """`quire bench startup`."""
    # As an exit, it ends the server, too: that has a session of its own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    check_json_path(args.output_json)
    counts = {"cold": args.num_iters_cold, "warm": args.num_iters_warm}
    if min(*counts.values(), args.num_iters_warmup) < 0 or not any(counts.values()):
        raise ConfigError("numbers of starts must not be negative, nor all 0", field="num_iters_cold")

    def make_command(port: int) -> list[str]:
        return serve_command(args.serve_cmd, args.model, args.flags, port)

    make_command(1)
    times: dict[str, list[Any]] = {"cold": [], "warm": []}
    with progress_bar() as progress:
        task = progress.add_task("starts", total=args.num_iters_warmup + sum(counts.values()))

        def start(*, is_cold: bool) -> Any:
            measured = measure_start(make_command, is_cold=is_cold, timeout_s=args.timeout)
            progress.advance(task)
            return measured

        times["cold"] = [start(is_cold=True) for _ in range(counts["cold"])]
        for _ in range(args.num_iters_warmup):
            start(is_cold=False)
        times["warm"] = [start(is_cold=False) for _ in range(counts["warm"])]
    figures = startup_results(times["cold"], times["warm"])
    settings = {name: value for name, value in vars(args).items() if name not in HIDDEN}
    show("startup", figures, settings, args.output_json)
    return 0
