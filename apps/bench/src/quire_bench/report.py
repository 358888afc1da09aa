"""Percentiles and how results are shown: a table for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["percentiles", "print_report", "write_json"]

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


def print_report(title: str, figures: Mapping[str, Any]) -> None:
    """One line per figure; latencies (nested mappings, in seconds) as a row of milliseconds."""
    print(f"\n{title}")
    for name, value in figures.items():
        if isinstance(value, Mapping):
            row = "  ".join(f"{point} {1000 * seconds:.1f}" for point, seconds in value.items())
            print(f"  {name.removesuffix('_s') + ' (ms)':32s}{row or 'no values'}")
        elif isinstance(value, float):
            print(f"  {name:32s}{value:.3f}")
        else:
            print(f"  {name:32s}{value}")


def write_json(path: str | None, figures: Mapping[str, Any]) -> None:
    """Write the figures as JSON to a file, or to standard output for "-"; nothing for None."""
    if path is None:
        return
    text = json.dumps(figures, indent=2)
    if path == "-":
        sys.stdout.write(text + "\n")
    else:
        Path(path).write_text(text + "\n")
