"""What parts of a sleeping engine are woken, by vLLM's tags."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable

from quire_interfaces import RequestError

__all__ = ["SLEEP_TAGS", "checked_tags"]

SLEEP_TAGS = ("weights", "kv_cache", "scheduling")


def checked_tags(tags: Iterable[str] | None) -> list[str]:
    """The parts of a sleeping engine to be woken.

    Args:
        tags: Some of `SLEEP_TAGS`; None, or none, for all.

    Raises:
        RequestError: there is no such tag.
    """
    given = list(tags or ())
    for tag in given:
        if tag not in SLEEP_TAGS:
            raise RequestError(f"tags must be some of {', '.join(SLEEP_TAGS)}, got {reprlib.repr(tag)}", param="tags")
    return given
