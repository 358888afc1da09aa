"""The largest load that keeps to limits, found by measuring: doubled until one fails, then halved. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire_interfaces import ConfigError

__all__ = ["largest_load", "misses", "parse_limits"]

_LIMIT = re.compile(r"\s*(\w+)\s*(<=|=|:)\s*([\d.eE+-]+)\s*")
_LATENCY = re.compile(r"(mean|median|std|p[\d.]+)_(ttft|tpot|itl|e2el)_ms")


def parse_limits(texts: Sequence[str]) -> dict[str, float]:
    """Upper limits of figures, given as `p99_ttft_ms=200`.

    Raises:
        ConfigError: one is something else, or none is given.
    """
    limits = {}
    for text in texts:
        found = _LIMIT.fullmatch(text)
        try:
            value = float(found[3]) if found else 0.0
        except ValueError:
            value = 0.0
        if found is None or not _LATENCY.fullmatch(found[1]) or not value > 0:
            raise ConfigError(
                "--sla takes FIGURE=MS, for example p99_ttft_ms=200 or p99_itl_ms=50 (mean, median or pNN of ttft, "
                f"tpot, itl or e2el), got {text!r}",
                field="sla",
            )
        limits[found[1]] = value
    if not limits:
        raise ConfigError("give at least one limit, for example --sla p99_ttft_ms=200", field="sla")
    return limits


def misses(figures: Mapping[str, Any], limits: Mapping[str, float]) -> list[str]:
    """What a run did not keep to; a failed request is one. Empty where all is well."""
    missed = [f"{figures['failed']} requests failed"] if figures.get("failed") else []
    if not figures.get("completed"):
        return missed or ["no request was answered"]
    return missed + [
        f"{name} {figures[name]:.1f} > {limit:g}" for name, limit in limits.items() if figures[name] > limit
    ]


def largest_load(
    is_kept: Callable[[float], bool],
    *,
    low: float,
    high: float,
    tolerance: float = 0.05,
    is_whole: bool = False,
) -> float | None:
    """The largest load that was seen to keep to the limits; None where not even the lowest does.

    Loads are doubled from `low` until one fails or `high` is reached, then the gap is halved until it is at most
    `tolerance` of the load that passed (1 for whole numbers).

    Args:
        is_kept: Measures a load; called once for each.
        low: The first load.
        high: The largest that is tried.
        tolerance: Relative.
        is_whole: Loads are whole numbers.

    Raises:
        ConfigError: bounds that cannot work.
    """
    if not 0 < low <= high:
        raise ConfigError(f"the search goes from --min, above 0, to --max, got {low:g} and {high:g}", field="min")
    if not 0 < tolerance < 1:
        raise ConfigError(f"--tolerance must lie between 0 and 1, got {tolerance:g}", field="tolerance")
    if not is_kept(low):
        return None
    passed, failed = low, None
    while failed is None and passed < high:
        tried = min(high, passed * 2)
        if is_kept(tried):
            passed = tried
        else:
            failed = tried
    while failed is not None:
        gap = failed - passed
        if gap <= (1 if is_whole else passed * tolerance):
            break
        tried = passed + gap / 2
        tried = float(int(tried)) if is_whole else tried
        if is_kept(tried):
            passed = tried
        else:
            failed = tried
    return passed
