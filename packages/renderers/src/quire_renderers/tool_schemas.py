"""What the offered tools say about the types of their parameters.

Knows JSON schema as far as a type can be read off it; refuses nothing.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["ToolSchemas", "value_as_json"]

_ANY: frozenset[str] = frozenset()
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
_MAX_DEPTH = 8


class ToolSchemas:
    """The tools of one request.

    Args:
        tools: OpenAI tool definitions, `{"type": "function", "function": {...}}`, or the functions alone. What is not
            understood in them is passed over: the engine of a request never fails for it.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._parameters: dict[str, Mapping[str, Any]] = {}
        self._types: dict[tuple[str, str], frozenset[str]] = {}
        for tool in tools or ():
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                schema = function.get("parameters")
                self._parameters[function["name"]] = schema if isinstance(schema, Mapping) else {}

    @property
    def names(self) -> Iterable[str]:
        """Of the tools."""
        return self._parameters.keys()

    def types(self, tool: str, parameter: str) -> frozenset[str]:
        """JSON types that a parameter may have; empty when nothing is known."""
        key = (tool, parameter)
        if key not in self._types:
            schema = self._parameters.get(tool, {})
            properties = schema.get("properties")
            own = properties.get(parameter) if isinstance(properties, Mapping) else None
            if own is None:
                own = schema.get("additionalProperties")
            self._types[key] = _types_of(own, schema, 0)
        return self._types[key]


def _types_of(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return _ANY
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str))
    if "const" in schema:
        return frozenset({_kind_of(schema["const"])})
    if isinstance(schema.get("enum"), list):
        return frozenset(_kind_of(value) for value in schema["enum"])
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            parts = [_types_of(part, root, depth + 1) for part in schema[word]]
            return frozenset().union(*parts) if all(parts) else _ANY
    if isinstance(schema.get("allOf"), list):
        known = [types for part in schema["allOf"] if (types := _types_of(part, root, depth + 1))]
        return frozenset.intersection(*known) if known else _ANY
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        return _types_of(target, root, depth + 1)
    return _ANY


def _kind_of(value: Any) -> str:
    return "null" if value is None else _KINDS.get(type(value), "string")


def value_as_json(text: str, types: frozenset[str], *, untyped: str) -> str:
    """A value written as plain text, as JSON of a type that fits.

    Args:
        text: What the model wrote.
        types: Allowed JSON types; empty when unknown.
        untyped: What to take for unknown types: "text", or "json" when it parses.
    """
    if not types and untyped == "text":
        return json.dumps(text, ensure_ascii=False)
    for parse in (_parse_json, _parse_python):
        known, value = parse(text)
        if known and (not types or _fits(value, types)):
            return json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


def _fits(value: Any, types: frozenset[str]) -> bool:
    kind = _kind_of(value)
    return kind in types or (kind == "integer" and "number" in types)


def _parse_json(text: str) -> tuple[bool, Any]:
    try:
        return True, json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False, None


def _parse_python(text: str) -> tuple[bool, Any]:
    """Models trained on Python write True, None and single quotes."""
    text = text.strip()
    if len(text) > 20_000:
        return False, None
    if text.lower() in ("true", "false", "null", "none"):
        return True, {"true": True, "false": False}.get(text.lower())
    if not text or text[0] not in "[{(":
        return False, None
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, OverflowError):
        return False, None
    return True, list(value) if isinstance(value, tuple) else value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
