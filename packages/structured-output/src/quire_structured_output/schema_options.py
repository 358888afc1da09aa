"""What is changed in a JSON schema before a backend sees it: options of requests, and what llguidance would misread."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from quire_interfaces import GrammarSpec, RequestError
from quire_structured_output.schema_rewrites import rewritten

__all__ = ["LIST_KEYWORDS", "MAP_KEYWORDS", "json_escapes", "schema_of", "to_the_letter"]

LIST_KEYWORDS = ("allOf", "anyOf", "oneOf", "prefixItems")
"""Keywords that hold a list of schemas."""
MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords that hold schemas by name."""
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")

_DIVISIBLE_BY_4 = "(?:0[48]|[2468][048]|[13579][26])"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_DIVISIBLE_BY_4}|{_DIVISIBLE_BY_4}00)"
_DAY = f"^(?:{_YEAR}-(?:(?:0[13-9]|1[0-2])-[0-9]{{2}}|02-(?:[01][0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_TIME = "[0-9]{2}:[0-9]{2}:[0-5][0-9]"
_CALENDAR = {"date": _DAY, "time": f"^{_TIME}", "date-time": f"{_DAY}[Tt]{_TIME}"}
"""What the library (1.9) leaves out of RFC 3339: in which years there is a 29 February, and that a leap second comes
at certain times only, so that validators refuse the others (section 5.7). The year 0, which calendars of many languages
lack, is left out, too."""

_EXCLUDES_ESCAPED = re.compile(r"\[\^[^\]]*\\")
"""A negated class with a quote or a backslash in it, which JSON text escapes. The library (1.9) lets such a class match
the escapes of the very characters it excludes, so strings get no such escapes then."""

_EXACT_INTEGERS = 1 << 53
"""The library (1.9) reads numbers as doubles."""


_UNREADABLE = re.compile(r"\(\?<?[=!]|\\[bB1-9]")
"""Look-arounds, word boundaries and references to groups."""

_MANY = 100
"""So many optional properties come in the schema's order. The library's (1.9) work per token grows with their number;
1,000 it refuses."""
_MAX_GROUPS = 8
"""Patterns of property names are compared pair by pair, which is slow for many."""
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
)
_NEEDS_PROPERTIES = re.compile(r'"\$ref": "[^"]*/properties/|"\$anchor": "|"allOf": \[')
"""What points to a property needs it where it is, and the library does not merge patterns that overlap."""
_NOT_GROUPED = frozenset(("patternProperties", "minProperties", "maxProperties"))


def schema_of(spec: GrammarSpec) -> Any:
    """The schema of a spec of kind "json", with what its options add.

    Raises:
        RequestError: it is nested too deeply to be read.
    """
    try:
        schema = json.loads(spec.text)
        return schema if spec.additional_properties else _mapped(schema, _closed)
    except RecursionError:
        raise RequestError(
            "structured_outputs.json is nested too deeply; flatten the schema, or use $ref to $defs",
            param="structured_outputs.json",
            code="grammar_too_large",
        ) from None


def to_the_letter(schema: Any, *, is_lenient: bool = False) -> Any:
    """The schema so that llguidance follows it to the letter: same meaning, or a narrower one.

    Args:
        schema: As it was sent.
        is_lenient: Leave patterns out that the library cannot read; keywords it leaves out itself, when told to.

    Raises:
        ValueError: it cannot; the message says why.
        RecursionError: it is nested too deeply.
    """
    if schema is True:
        return {}
    exact = _mapped(schema, lambda each: _exact(rewritten(each, schema)))
    if is_lenient:
        exact = _mapped(exact, _without_unreadable_patterns)
    return exact if _NEEDS_PROPERTIES.search(json.dumps(schema)) else _mapped(exact, _grouped)


def json_escapes(schema: str) -> str | None:
    """The letters that may follow a backslash in strings of a schema, given as text; None for all."""
    return "nrbtfu" if _EXCLUDES_ESCAPED.search(schema) else None


def _mapped(schema: Any, change: Callable[[dict[str, Any]], Any]) -> Any:
    """The schema with every schema in it changed, inner ones first."""
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for key in LIST_KEYWORDS:
        if isinstance(result.get(key), list):
            result[key] = [_mapped(each, change) for each in result[key]]
    for key in MAP_KEYWORDS:
        if isinstance(result.get(key), dict):
            result[key] = {name: _mapped(each, change) for name, each in result[key].items()}
    for key in _SINGLE:
        if isinstance(result.get(key), dict):
            result[key] = _mapped(result[key], change)
    return change(result)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """`additionalProperties: false` where properties are named and nothing is said about others."""
    if "properties" in schema and "patternProperties" not in schema:
        schema.setdefault("additionalProperties", False)
    return schema


def _exact(schema: dict[str, Any]) -> Any:
    if schema == {"not": {}} or schema == {"not": True}:  # as schema generators write "never"
        return False
    for value in _integers([schema.get("const"), schema.get("enum")]):
        if abs(value) > _EXACT_INTEGERS:
            raise ValueError(f"{value} in const or enum is beyond 2**53, where integers are no longer told apart")
    pattern = _CALENDAR.get(schema["format"]) if isinstance(schema.get("format"), str) else None
    if pattern is not None:
        schema["allOf"] = [*_elements(schema.get("allOf")), {"pattern": pattern}]
    return schema


def _without_unreadable_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    if isinstance(schema.get("pattern"), str) and _UNREADABLE.search(schema["pattern"]):
        del schema["pattern"]
    return schema


def _grouped(schema: dict[str, Any]) -> dict[str, Any]:
    """Many optional properties as patterns, one for all that have the same schema."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or len(properties) <= _MANY or _NOT_GROUPED & schema.keys():
        return schema
    required = {name for name in _elements(schema.get("required")) if isinstance(name, str)}
    groups: dict[str, list[str]] = {}
    for name, value in properties.items():
        if name not in required:
            plain = {key: value[key] for key in value.keys() - _ANNOTATIONS} if isinstance(value, dict) else value
            groups.setdefault(json.dumps(plain, sort_keys=True), []).append(name)
    if sum(map(len, groups.values())) <= _MANY or len(groups) > _MAX_GROUPS:
        return schema
    schema["properties"] = {name: value for name, value in properties.items() if name in required}
    schema["patternProperties"] = {
        f"^(?:{'|'.join(map(re.escape, sorted(names)))})$": json.loads(value) for value, names in groups.items()
    }
    return schema


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, (list, dict)):
        for each in value if isinstance(value, list) else value.values():
            yield from _integers(each)


def _elements(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
