"""Patterns that only a few texts match, and which these are."""

from __future__ import annotations

import itertools
import re
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

__all__ = ["finite_language"]


def finite_language(pattern: str, most: int) -> list[str] | None:
    """The texts that a pattern matches, from the beginning to the end; None where there are more than `most`, or where
    the pattern holds more than letters, classes, groups, alternatives and bounded repetitions between its anchors."""
    try:
        parsed = list(parser.parse(pattern))
    except (re.error, RecursionError, OverflowError):
        return None
    if len(parsed) < 2 or parsed[0] != (sre.AT, sre.AT_BEGINNING) or parsed[-1] != (sre.AT, sre.AT_END):
        return None
    texts = _sequence(parsed[1:-1], most)
    return None if texts is None else list(dict.fromkeys(texts))


def _sequence(items: Any, most: int) -> list[str] | None:
    texts = [""]
    for item in items:
        pieces = _texts(item, most)
        if pieces is None or len(texts) * len(pieces) > most:
            return None
        texts = [begin + piece for begin in texts for piece in pieces]
    return texts


def _texts(item: Any, most: int) -> list[str] | None:
    kind, value = item
    if kind is sre.LITERAL:
        return [chr(value)]
    if kind is sre.SUBPATTERN:
        _, add_flags, del_flags, inner = value
        return None if add_flags or del_flags else _sequence(inner, most)
    if kind is sre.BRANCH:
        parts = [_sequence(each, most) for each in value[1]]
        if any(part is None for part in parts):
            return None
        texts = [text for part in parts for text in part or ()]
        return texts if len(texts) <= most else None
    if kind is sre.IN:
        return _class(value, most)
    if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        low, high, inner = value
        one = _sequence(inner, most)
        if one is None or high > most:
            return None
        texts = []
        for count in range(low, high + 1):
            if len(one) ** count + len(texts) > most:
                return None
            texts += ["".join(each) for each in itertools.product(one, repeat=count)]
        return texts
    return None


def _class(members: Any, most: int) -> list[str] | None:
    letters: list[str] = []
    for kind, value in members:
        if kind is sre.LITERAL:
            letters.append(chr(value))
        elif kind is sre.RANGE and value[1] - value[0] < most:
            letters += [chr(code) for code in range(value[0], value[1] + 1)]
        else:
            return None
    return letters if len(letters) <= most else None
