"""What parts of a sleeping engine are woken, by vLLM's tags."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable

from quire_interfaces import RequestError

__all__ = ["SLEEP_TAGS", "wakes_engine"]

SLEEP_TAGS = ("weights", "kv_cache", "scheduling")


def wakes_engine(tags: Iterable[str] | None) -> bool:
    """Whether an engine runs requests again when these parts of it are woken: weights are always there, so that waking
    them alone changes nothing.

    Args:
        tags: Some of `SLEEP_TAGS`; None, or none, for all.

    Raises:
        RequestError: there is no such tag.
    """
    given = list(tags or ())
    for tag in given:
        if tag not in SLEEP_TAGS:
            raise RequestError(f"tags must be some of {', '.join(SLEEP_TAGS)}, got {reprlib.repr(tag)}", param="tags")
    return not given or given != ["weights"] * len(given)
