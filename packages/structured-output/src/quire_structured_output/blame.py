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
    path, total = "$", size
    while True:
        if isinstance(value, dict):
            children = [
                (f".{key[:40]}" if key.isidentifier() else f"[{_quoted(key)}]", each) for key, each in value.items()
            ]
        elif isinstance(value, list):
            children = [(f"[{index}]", each) for index, each in enumerate(value)]
        else:
            break
        sizes = [_size(each) for _, each in children]
        largest = max(range(len(sizes)), key=sizes.__getitem__, default=None)
        if largest is None or sizes[largest] < _SHARE * total:
            break
        path += children[largest][0]
        value, total = children[largest][1], sizes[largest]
    what = ""
    if isinstance(value, (dict, list)):
        what = f"{len(value)} {'keys' if isinstance(value, dict) else 'elements'}, "
    return f"{path} ({what}{total} characters)"


def _size(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


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
