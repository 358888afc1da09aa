"""Values of settings as text: from a command line, an environment variable or a file, as the type of the field.

Knows how numbers, switches, lists and objects are written; which settings there are, `quire.setting_fields` says.
"""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from quire.environment import ENVIRONMENT
from quire.setting_fields import ConfigField
from quire_interfaces import ConfigError

__all__ = ["SUFFIXES_IN_WORDS", "json_list", "parse_items", "parse_text", "parse_whole_number"]

_FACTORS = (
    {"": 1}
    | {
        suffix: base**power
        for power, letter in enumerate("kmgt", 1)
        for base, spellings in (
            (1000, (letter, f"{letter}b", f"{letter.upper()}B", f"{letter}B")),
            (1024, (letter.upper(), f"{letter.upper()}i", f"{letter.upper()}iB", f"{letter}i", f"{letter}ib")),
        )
        for suffix in spellings
    }
    | {"b": 1, "B": 1}
)
"""Suffix of a number -> what it is multiplied by. As in vLLM, a small letter alone is a power of 1000 and a capital one
of 1024."""

SUFFIXES_IN_WORDS = "4096, 4k (4000), 4K (4096), 1e6; sizes also 512MB (powers of 1000), 8G, 8GiB (of 1024), up to T"

_NUMBER = re.compile(r"([+-]?[0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+]?[0-9]{1,3})?)\s*([A-Za-z]*)")


def parse_whole_number(text: str) -> int:
    """A whole number, which may be written with a suffix, a fraction that the suffix takes up, or an exponent.

    Raises:
        ValueError: it is none.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2] not in _FACTORS:
        raise ValueError(f"not a whole number: {text!r}")
    value = Decimal(match[1].replace("_", "")) * _FACTORS[match[2]]
    if value != value.to_integral_value():
        raise ValueError(f"not a whole number: {text!r}")
    return int(value)


def parse_text(spec: ConfigField, text: str, source: str = "command line") -> Any:
    """Text from a command line, environment or file (`source`), as the type of the field.

    Raises:
        ConfigError: naming the flag or the environment variable, the text and what was expected.
    """
    kinds = [kind for kind in _alternatives(spec.type) if kind is not type(None)]
    optional = len(kinds) < len(_alternatives(spec.type))
    if optional and text.lower() in ("", "none", "null"):
        return None
    if spec.secret and typing.get_origin(kinds[0]) is tuple and not text.lstrip().startswith("["):
        return tuple(part.strip() for part in text.split(","))  # an empty one is a mistake, and its check says so
    try:
        return _convert(kinds[0], text)
    except (ValueError, KeyError) as error:
        if spec.secret:
            text = "..."
        where = spec.env if source == ENVIRONMENT else spec.flag
        raise ConfigError(f"{where} expects {_expected(kinds[0], spec.unit)}, got {text!r}", field=spec.name) from error


def parse_items(spec: ConfigField, values: Sequence[Any], source: str = "command line") -> tuple[Any, ...]:
    """The elements of a list, those that are text as the type of the field's elements.

    Raises:
        ConfigError: as `parse_text`.
    """
    kinds = [
        typing.get_args(kind) for kind in (spec.type, *_alternatives(spec.type)) if typing.get_origin(kind) is tuple
    ]
    item = kinds[0][0] if kinds else str
    if item is str:
        return tuple(values)
    element = spec._replace(type=item)
    return tuple(parse_text(element, each, source) if isinstance(each, str) else each for each in values)


def _expected(kind: Any, unit: str) -> str:
    origin = typing.get_origin(kind) or kind
    if origin is int:
        return f"a whole number of {unit}, such as {SUFFIXES_IN_WORDS}" if unit else "a whole number"
    if origin is float:
        return f"a number of {unit}" if unit else "a number"
    if origin is bool:
        return "true or false"
    if origin is tuple:
        return "whole numbers with commas between them"  # lists of text take any text
    return "a JSON object" if origin in (dict, Mapping) else getattr(kind, "__name__", str(kind))


def _convert(kind: Any, text: str) -> Any:
    origin = typing.get_origin(kind) or kind
    if origin is bool:
        switches = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False}
        return (switches | {"off": False})[text.strip().lower()]
    if origin is int:
        return parse_whole_number(text)
    if origin is float:
        return float(text)
    if origin is tuple:
        (item, *_) = typing.get_args(kind)
        if (listed := json_list(text)) is not None:
            return tuple(_convert(item, part) for part in listed)
        return tuple(_convert(item, part.strip()) for part in text.split(",") if part.strip())
    if origin in (dict, Mapping):
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
        return value
    return text


def json_list(text: str) -> list[str] | None:
    """The items of a JSON list, as vLLM also takes lists; None for any other text."""
    try:
        value = json.loads(text) if text.lstrip().startswith("[") else None
    except ValueError:
        return None
    return [str(item) for item in value] if isinstance(value, list) else None


def _alternatives(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)
