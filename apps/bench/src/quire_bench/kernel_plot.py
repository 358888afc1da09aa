"""Figures of kernels as a picture: for each op and shape a bar for each backend, as long as its share of the limit.

SVG, written here: one column of rows, which a browser shows, with nothing to install.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from quire_bench.kernels import KernelFigure
from quire_interfaces import ConfigError

__all__ = ["plot", "write_svg"]

LABELS, FULL, FIGURES = 130, 420, 400
"""Widths in pixels: what was measured, a bar that reaches the limit, the figures behind it."""
BAR, GAP, TOP = 16, 10, 74
COLORS = ("#3b6fb6", "#d9822b", "#4f9a59", "#a04f9a", "#8a7a3c", "#c0504d")


def plot(figures: Sequence[KernelFigure], machine: dict[str, Any]) -> str:
    """The picture as text.

    Args:
        figures: Those of an op and shape next to each other.
        machine: Of the run: device, dtype, read_bytes_per_s and matmul_flop_per_s.
    """
    backends = list(dict.fromkeys(figure.backend for figure in figures))
    longest = max([1.0, *(figure.of_limit for figure in figures)])  # in a cache that was counted as memory
    full = FULL / longest
    rows, y = [], TOP
    for (op, shape), group in groupby(figures, key=lambda figure: (figure.op, figure.shape)):
        rows.append(_text(0, y + 12, f"{op}  {shape}", weight="600"))
        y += BAR + 4
        for figure in group:
            color = COLORS[backends.index(figure.backend) % len(COLORS)]
            width = full * figure.of_limit
            rate = (
                f"{figure.bytes_per_s / 1e9:.1f} GB/s"
                if figure.bound_by == "memory"
                else f"{figure.flop_per_s / 1e12:.3f} TFLOP/s"
            )
            words = (
                f"{100 * figure.of_limit:.0f}% of the {figure.bound_by} limit, {1e6 * figure.median_s:.1f} us, {rate}"
            )
            rows.append(_text(LABELS - 10, y + 12, figure.backend, anchor="end"))
            rows.append(
                f'<rect class="bar" x="{LABELS}" y="{y}" width="{width:.2f}" height="{BAR - 2}" fill="{color}">'
                f"<title>{escape(f'{figure.backend}: {op} {shape}: {words}')}</title></rect>"
            )
            rows.append(_text(LABELS + FULL + 12, y + 12, words))
            y += BAR
        y += GAP
    limit = LABELS + full
    read, product = machine["read_bytes_per_s"] / 1e9, machine["matmul_flop_per_s"] / 1e12
    title = f"Kernels on {machine['device']} in {machine['dtype']}"
    limits = f"limits of this run: {read:.1f} GB/s read, {product:.3f} TFLOP/s of matrix products; right is better"
    width = LABELS + FULL + FIGURES
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + 10}" '
        f'viewBox="-10 0 {width + 20} {y + 10}" font-family="sans-serif" font-size="12">',
        f'<rect x="-10" width="{width + 20}" height="{y + 10}" fill="white"/>',
        _text(0, 22, title, weight="700", size=16),
        _text(0, 42, limits),
        *rows,
        f'<line class="limit" x1="{limit:.2f}" x2="{limit:.2f}" y1="{TOP - 12}" y2="{y}" stroke="#333" '
        'stroke-dasharray="4 3"/>',
        _text(round(limit), TOP - 16, "limit", anchor="middle"),
        "</svg>\n",
    ])  # fmt: skip


def _text(x: int, y: int, words: str, *, weight: str = "400", size: int = 12, anchor: str = "start") -> str:
    style = f'font-weight="{weight}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" {style} fill="#222">{escape(words)}</text>'


def write_svg(figures: Sequence[KernelFigure], machine: dict[str, Any], path: str | Path) -> None:
    """Write the picture.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        Path(path).write_text(plot(figures, machine), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", field="svg") from None
