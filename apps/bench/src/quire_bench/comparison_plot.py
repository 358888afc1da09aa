"""Figures of `quire bench peers` as a picture: in each situation a bar for each engine. SVG, and one HTML file."""

from __future__ import annotations

from html import escape
from pathlib import Path

from quire_bench.comparison import Comparison
from quire_bench.comparison_report import comparison_text, figure_text
from quire_bench.comparison_setup import ComparisonPlan
from quire_interfaces import ConfigError

__all__ = ["comparison_svg", "write_plots"]

LABELS, FULL, FIGURES = 170, 420, 330
"""Widths in pixels: names, the longest bar of a situation, the figures behind it."""
BAR, GAP, TOP = 18, 14, 70
OURS_COLOR, PEER_COLOR = "#3b6fb6", "#9aa5b1"


def comparison_svg(result: Comparison, plan: ComparisonPlan) -> str:
    """The picture as text; a dashed line is what the machine allows."""
    rows, y = [], TOP
    for situation in result.situations:
        medians = {name: result.median(situation.name, name) for name in result.engines}
        limits = {name: result.limits(situation, name, plan.work[name])[-1] for name in result.engines}
        known = [figure for figure in (*medians.values(), *limits.values()) if figure]
        if not known:
            continue
        scale = FULL / max(known)
        rows.append(_text(0, y + 12, situation.title, weight="600"))
        y += BAR + 4
        for engine in plan.engines:
            figure, limit = medians[engine.name], limits[engine.name]
            ratio = None if engine.is_ours else result.ratio(situation.name, engine.name)
            words = figure_text(situation, figure) + ("" if ratio is None else f" (Quire/this: {ratio:.2f})")
            color = OURS_COLOR if engine.is_ours else PEER_COLOR
            width = scale * (figure or 0)
            rows.append(_text(LABELS - 8, y + 12, engine.name, anchor="end"))
            rows.append(
                f'<rect class="bar" x="{LABELS}" y="{y}" width="{width:.1f}" height="{BAR - 3}" fill="{color}">'
                f"<title>{escape(f'{engine.name}, {situation.title}: {words}')}</title></rect>"
            )
            if limit:
                x = LABELS + scale * limit
                rows.append(
                    f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 1}" y2="{y + BAR - 2}" stroke="#333" '
                    'stroke-dasharray="3 2"/>'
                )
            rows.append(_text(LABELS + FULL + 10, y + 12, words))
            y += BAR
        y += GAP
    width = LABELS + FULL + FIGURES
    count = len(result.machine)
    below = f"{plan.architecture}, {plan.dtype}; medians of {count} round{'' if count == 1 else 's'}"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 0 {width + 20} {y + 10}" width="{width + 20}" '
        f'height="{y + 10}" font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape(plan.model)}</title>",
        f'<rect x="-10" width="{width + 20}" height="{y + 10}" fill="white"/>',
        _text(0, 22, plan.model, weight="700", size=16),
        _text(0, 42, f"{below}; dashed: what the machine allows"),
        *rows,
        "</svg>\n",
    ])  # fmt: skip


def write_plots(result: Comparison, plan: ComparisonPlan, *, svg: str | None, html: str | None) -> None:
    """Write the files that are named.

    Raises:
        ConfigError: a file cannot be written.
    """
    if svg is None and html is None:
        return
    picture = comparison_svg(result, plan)
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(plan.model)}</title>'
        f"<body>{picture}<pre>{escape(comparison_text(result, plan))}</pre></body></html>\n"
    )
    for path, text, field in ((svg, picture, "svg"), (html, page, "html")):
        if path is not None:
            try:
                Path(path).write_text(text, encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"cannot write {path}: {error.strerror}", field=field) from None


def _text(x: int, y: int, words: str, *, weight: str = "400", size: int = 12, anchor: str = "start") -> str:
    style = f'font-weight="{weight}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" {style} fill="#222">{escape(words)}</text>'
