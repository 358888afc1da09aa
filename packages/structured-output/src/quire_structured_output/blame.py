"""Which part of a constraint is the large one, for the message to whoever sent it. Linear in its size."""

from __future__ import annotations

import json
import re
from typing import Any

from quire_interfaces import GrammarSpec

__all__ = ["largest_part"]

_COUNTED = re.compile(r"\{\s*\d+\s*(?:,\s*\d*\s*)?\}")
_SHARE = 0.5


def largest_part(spec: GrammarSpec) -> str:
    """The part that holds more than half of the content, as a phrase with its place and size."""
    try:
        if spec.kind in ("json", "structural_tag"):
            return _of_json(json.loads(spec.text), len(spec.text))
        if spec.kind == "choice":
            return _of_choice(json.loads(spec.text))
    except (ValueError, RecursionError):
        return f"the whole of it, {len(spec.text)} characters nested too deeply to look into"
    if spec.kind == "regex":
        return _of_regex(spec.text)
    lines = spec.text.splitlines() or [spec.text]
    longest = max(range(len(lines)), key=lambda i: len(lines[i]))
    return f"line {longest + 1} of {len(lines)}, {_quoted(lines[longest])} ({len(lines[longest])} characters)"


def _of_json(value: Any, size: int) -> str:
    """Walk down while one child holds more than half of what is left."""
    sizes: dict[int, int] = {}
    _measure(value, sizes)
    path, total = "$", size
    while isinstance(value, (dict, list)) and value:
        keys: list[Any] = list(value if isinstance(value, dict) else range(len(value)))
        largest = max(keys, key=lambda key: sizes[id(value[key])])
        if sizes[id(value[largest])] < _SHARE * total:
            break
        value = value[largest]
        total = sizes[id(value)]
        is_name = isinstance(largest, str) and largest.isidentifier()
        path += f".{largest[:40]}" if is_name else f"[{_quoted(largest) if isinstance(largest, str) else largest}]"
    what = ""
    if isinstance(value, (dict, list)):
        what = f"{len(value)} {'keys' if isinstance(value, dict) else 'elements'}, "
    return f"{path[-400:]} ({what}{total} characters)"


def _measure(value: Any, sizes: dict[int, int]) -> int:
    """Characters of `value` and of everything in it, by identity (equal small values may share an entry)."""
    if isinstance(value, dict):
        size = 2 + sum(len(key) + 4 + _measure(each, sizes) for key, each in value.items())
    elif isinstance(value, list):
        size = 2 + sum(1 + _measure(each, sizes) for each in value)
    else:
        size = len(value) + 2 if isinstance(value, str) else len(str(value))
    sizes[id(value)] = size
    return size


def _of_choice(texts: list[str]) -> str:
    longest = max(texts, key=len)
    if len(longest) > _SHARE * sum(map(len, texts)):
        return f"the text {_quoted(longest)} ({len(longest)} characters)"
    return f"the list of {len(texts)} texts, {sum(map(len, texts))} characters together"


def _of_regex(pattern: str) -> str:
    counted = max(_COUNTED.findall(pattern), key=_upper_bound, default=None)
    if counted is not None and _upper_bound(counted) >= 100:
        at = pattern.index(counted)
        return f"the repetition {counted} after {_quoted(pattern[max(0, at - 20) : at])}"
    return f"the pattern {_quoted(pattern)} ({len(pattern)} characters)"


def _upper_bound(counted: str) -> int:
    # Digits beyond what int() takes at once are large enough anyway.
    return max(int(digits[:18]) for digits in re.findall(r"\d+", counted))


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 43 else text[:40] + "...")
