"""How many JSON values a request body holds, found without parsing it.

Parsing holds the interpreter lock, and its time and memory grow with the number of values more than with the size: 30
MB are one text, or 15 million lists. Values are counted by the characters between them. Knows no field's meaning.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ValueBounds", "ValueCount", "count_values", "may_exceed"]

_CHUNK_BYTES = 1 << 16
"""Counted in one go, within 0.1 ms."""


class ValueBounds(NamedTuple):
    """Most values of a body."""

    max_values: int
    """Of any kind, names of fields not counted."""
    max_objects: int
    """Lists and objects: each costs as much as ten numbers."""


class ValueCount(NamedTuple):
    """What a body holds."""

    num_values: int
    num_objects: int

    def exceeds(self, bounds: ValueBounds) -> bool:
        return self.num_values > bounds.max_values or self.num_objects > bounds.max_objects


def may_exceed(data: bytes, bounds: ValueBounds) -> bool:
    """Whether a body may hold more values than allowed. Texts are not told from what is between them, so that a yes may
    be wrong; a no is right. Costs no more than the bounds and a look at each byte."""
    if len(data) < min(bounds):
        return False
    num_commas = num_objects = 0
    for start in range(0, len(data), _CHUNK_BYTES):
        chunk = data[start : start + _CHUNK_BYTES]
        num_objects += chunk.count(b"[") + chunk.count(b"{")
        num_commas += chunk.count(b",")
        if ValueCount(num_commas + num_objects + 1, num_objects).exceeds(bounds):
            return True
    return False


def count_values(data: bytes, bounds: ValueBounds) -> ValueCount:
    """The values of a body, as if it was JSON: at least as many as there are, and exact where no list or object is
    empty. Beyond the bounds, some number beyond them."""
    structure = data
    if b'"' in data:
        # Pairs of backslashes go first: what is left before a quote makes it part of a text.
        unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
        most_texts = 2 * bounds.max_values + 1  # each value may have a name
        if unescaped.count(b'"') > 2 * most_texts:
            return ValueCount(unescaped.count(b'"') // 4, 0)
        structure = b"".join(unescaped.split(b'"')[::2])
    num_objects = structure.count(b"[") + structure.count(b"{")
    return ValueCount(structure.count(b",") + num_objects + 1, num_objects)
