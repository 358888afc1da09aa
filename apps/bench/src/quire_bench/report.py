"""Percentiles and how results are shown: a table for people, JSON for programs, progress on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quire_interfaces import ConfigError

__all__ = ["check_json_path", "percentiles", "progress_bar", "show", "write_json"]

_POINTS = (50, 90, 99)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """mean, p50, p90, p99 and max of the values, by linear interpolation between ranks; empty for no values."""
    if not values:
        return {}
    ordered = sorted(values)
    result = {"mean": sum(ordered) / len(ordered)}
    for point in _POINTS:
        place = (len(ordered) - 1) * point / 100
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        result[f"p{point}"] = ordered[below] + (ordered[above] - ordered[below]) * (place - below)
    result["max"] = ordered[-1]
    return result


def progress_bar() -> Progress:
    """A progress bar on standard error that leaves nothing behind; refreshed rarely, to leave the machine alone."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4)


def check_json_path(path: str | None) -> None:
    """Fail before a long run, not after it.

    Raises:
        ConfigError: there is no folder to write `path` into.
    """
    if path in (None, "-"):
        return
    target = Path(str(path))
    if target.is_dir() or not target.parent.is_dir():
        raise ConfigError(f"--output-json {path}: not a file in an existing folder; name another", field="output_json")


def show(title: str, figures: Mapping[str, Any], settings: Mapping[str, Any], json_path: str | None) -> None:
    """Print the table; write figures and settings as JSON when a path is given.

    Args:
        title: The benchmark.
        figures: Name -> number, text, list, or percentiles in seconds (a mapping).
        settings: What was asked for; only in the JSON.
        json_path: A file, "-" for standard output (the table goes to standard error then), or None.

    Raises:
        ConfigError: the file cannot be written.
    """
    _print_table(title, figures, sys.stderr if json_path == "-" else sys.stdout)
    if json_path is None:
        return
    write_json({"benchmark": title, "settings": dict(settings), **figures}, json_path)


def write_json(value: Mapping[str, Any], json_path: str) -> None:
    """Write a file, or "-", standard output.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = json.dumps(value, indent=2, default=str) + "\n"
    if json_path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(json_path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {json_path}: {error.strerror}", field="output_json") from None


def _print_table(title: str, figures: Mapping[str, Any], file: Any) -> None:
    """One line per figure; percentiles as a row of milliseconds."""
    print(title, file=file)
    for name, value in figures.items():
        if value is None:
            continue
        if isinstance(value, Mapping):
            name = f"{name.removesuffix('_s')}_ms"
            value = "  ".join(f"{point} {1000 * seconds:.1f}" for point, seconds in value.items()) or "no values"
        elif isinstance(value, float):
            value = f"{value:.3f}"
        print(f"  {name:36s}{value}", file=file)
