"""Throughput of each user against throughput of all: which loads no other one beats in both. SVG and one HTML file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from quire_interfaces import ConfigError

__all__ = ["ParetoPoint", "html_page", "pareto_front", "point_of", "svg_plot", "write_text"]

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 820, 520, 90, 60, 30, 70
COLORS = ("#3b6fb6", "#d9822b", "#4f9a59", "#a04f9a", "#8a7a3c", "#c0504d")


class ParetoPoint(NamedTuple):
    """One load."""

    label: str
    per_user: float
    """Output tokens per second of one user."""
    total: float
    """Output tokens per second of all."""
    series: str = ""
    """What it is compared with others of."""


def point_of(figures: Mapping[str, Any], series: str = "") -> ParetoPoint:
    """The point of a run's figures (`serving_results`): users are those who were let in at once, else the mean number
    of requests in flight.

    Raises:
        ConfigError: they are no such figures.
    """
    try:
        concurrency = figures.get("max_concurrency")
        mean = float(figures["mean_concurrent_requests"])
        users = float(concurrency) if concurrency not in (None, "") else mean
        total = float(figures["output_throughput"])
        rate = figures.get("request_rate", "inf")
    except (KeyError, TypeError, ValueError):
        raise ConfigError("these are no figures of bench serve or bench sweep serve", field="file") from None
    label = f"{users:g} at once" if concurrency not in (None, "") else f"{rate} requests/s"
    return ParetoPoint(label, total / users if users > 0 else 0.0, total, series)


def pareto_front(points: Sequence[ParetoPoint]) -> list[ParetoPoint]:
    """Those that no other point beats in one and equals in the other, by growing throughput of each user."""
    front: list[ParetoPoint] = []
    for point in sorted(points, key=lambda each: (-each.per_user, -each.total)):
        if not front or point.total > front[-1].total:
            front.append(point)
    return front[::-1]


def _ticks(largest: float) -> list[float]:
    step = 10 ** math.floor(math.log10(largest)) if largest > 0 else 1.0
    step = next(step * factor for factor in (0.2, 0.5, 1.0, 2.0) if largest / (step * factor) <= 7)
    return [number * step for number in range(int(largest / step) + 2)]


def svg_plot(points: Sequence[ParetoPoint], title: str = "Throughput of each user and of all") -> str:
    """The plot: a dot for each load, a line through those of each series that nothing beats.

    Raises:
        ConfigError: there are no points.
    """
    if not points:
        raise ConfigError("there is nothing to plot", field="file")
    x_ticks, y_ticks = (
        _ticks(max(each.per_user for each in points)), _ticks(max(each.total for each in points)),
    )  # fmt: skip
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(value: float) -> float:
        return LEFT + wide * value / x_ticks[-1]

    def y(value: float) -> float:
        return TOP + high * (1 - value / y_ticks[-1])

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 30, title, size=16, weight="700"),
        _text(LEFT + wide / 2, HEIGHT - 18, "output tokens/s of each user", anchor="middle"),
        f'<g transform="translate(18 {TOP + high / 2}) rotate(-90)">'
        + _text(0, 0, "output tokens/s of all users", anchor="middle")
        + "</g>",
    ]
    for tick in x_ticks:
        parts += [
            _line(x(tick), TOP, x(tick), TOP + high),
            _text(x(tick), TOP + high + 18, f"{tick:g}", anchor="middle"),
        ]
    for tick in y_ticks:
        parts += [_line(LEFT, y(tick), LEFT + wide, y(tick)), _text(LEFT - 8, y(tick) + 4, f"{tick:g}", anchor="end")]
    for number, series in enumerate(dict.fromkeys(each.series for each in points)):
        color = COLORS[number % len(COLORS)]
        own = [each for each in points if each.series == series]
        line = " ".join(f"{x(each.per_user):.1f},{y(each.total):.1f}" for each in pareto_front(own))
        parts.append(f'<polyline class="front" points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        for each in own:
            words = (
                f"{series + ': ' if series else ''}{each.label}: {each.per_user:.1f} of each, {each.total:.1f} of all"
            )
            parts.append(
                f'<circle class="load" cx="{x(each.per_user):.1f}" cy="{y(each.total):.1f}" r="5" fill="{color}">'
                f"<title>{escape(words)}</title></circle>"
            )
            parts.append(_text(x(each.per_user) + 8, y(each.total) - 6, each.label))
        if series:
            parts.append(f'<rect x="{WIDTH - 200}" y="{TOP + 18 * number}" width="12" height="12" fill="{color}"/>')
            parts.append(_text(WIDTH - 182, TOP + 18 * number + 11, series))
    return "\n".join([*parts, "</svg>\n"])


def _text(x: float, y: float, words: str, *, size: int = 12, weight: str = "400", anchor: str = "start") -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style} fill="#222">{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def html_page(points: Sequence[ParetoPoint], rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """The plot and the figures in one file that asks nobody for anything.

    Raises:
        ConfigError: there are no points.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(_shown(row.get(name)))}</td>" for name in names) + "</tr>\n" for row in rows
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        "<style>body{font:14px sans-serif;margin:2em;color:#222}div{overflow-x:auto}svg{max-width:100%;height:auto}"
        "table{border-collapse:collapse}td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #ddd;"
        "white-space:nowrap}</style></head>\n"
        f"<body>\n{svg_plot(points, title)}<div><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"
        "</div>\n</body></html>\n"
    )


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def write_text(text: str, path: str, flag: str) -> None:
    """Write a file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        Path(path).expanduser().write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be written ({error.strerror})", field=flag.strip("-")) from None
