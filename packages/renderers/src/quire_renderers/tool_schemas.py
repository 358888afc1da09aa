"""What the offered tools say about the types of their parameters.

Knows JSON schema as far as a type can be read off it; refuses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire_renderers.literal_relay import JSON, PYTHON, LiteralDialect, LiteralRelay, json_string

__all__ = ["ToolSchemas", "value_as_json"]

_ANY: frozenset[str] = frozenset()
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
_NUMBERS = frozenset({"integer", "number"})
_KINDS_BY_FIRST = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_PYTHON_WORDS = ("True", "False", "None")
_OTHER_NAMES = {
    "str": "string", "text": "string", "int": "integer", "float": "number", "double": "number", "bool": "boolean",
    "dict": "object", "list": "array", "tuple": "array", "none": "null",
}  # fmt: skip
"""Types as people write them who know other languages better than JSON schema."""
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

    def has_parameter(self, tool: str, parameter: str) -> bool:
        """Whether a tool may have a parameter of this name, as far as its schema says."""
        schema = self._parameters.get(tool, {})
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or parameter in properties:
            return True
        return schema.get("additionalProperties") not in (None, False)

    def parameters(self, tool: str) -> Mapping[str, Any]:
        """The schema of a tool's parameters; empty when there is none."""
        return self._parameters.get(tool, {})

    def types_of(self, tool: str, schema: Mapping[str, Any]) -> frozenset[str]:
        """JSON types that a part of a tool's schema allows; empty when nothing is known."""
        return _TypeReader(self.parameters(tool)).types(schema)

    def types(self, tool: str, parameter: str) -> frozenset[str]:
        """JSON types that a parameter may have; empty when nothing is known."""
        key = (tool, parameter)
        if key not in self._types:
            schema = self._parameters.get(tool, {})
            properties = schema.get("properties")
            own = properties.get(parameter) if isinstance(properties, Mapping) else None
            if own is None:
                own = schema.get("additionalProperties")
            self._types[key] = _TypeReader(schema).types(own)
        return self._types[key]


class _TypeReader:
    """Reads types off the parts of one schema, following each reference once."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._references: dict[str, frozenset[str]] = {}

    def types(self, schema: Any, depth: int = 0) -> frozenset[str]:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return _ANY
        types = self._own_types(schema, depth)
        return types | {"null"} if types and schema.get("nullable") is True else types

    def _own_types(self, schema: Mapping[str, Any], depth: int) -> frozenset[str]:
        kind = schema.get("type")
        if isinstance(kind, (str, list)):
            kinds = [kind] if isinstance(kind, str) else [each for each in kind if isinstance(each, str)]
            return frozenset(_OTHER_NAMES.get(each, each) for each in kinds)
        if "const" in schema:
            return frozenset({_kind_of(schema["const"])})
        if isinstance(schema.get("enum"), list):
            return frozenset(_kind_of(value) for value in schema["enum"])
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list):
                parts = [self.types(part, depth + 1) for part in schema[word]]
                return frozenset().union(*parts) if all(parts) else _ANY
        if isinstance(schema.get("allOf"), list):
            known = [types for part in schema["allOf"] if (types := self.types(part, depth + 1))]
            return frozenset.intersection(*known) if known else _ANY
        reference = schema.get("$ref")
        return self._referred(reference, depth) if isinstance(reference, str) else _ANY

    def _referred(self, reference: str, depth: int) -> frozenset[str]:
        if reference not in self._references:
            self._references[reference] = _ANY  # while it is being read: a reference to itself says nothing
            target: Any = self._root if reference.startswith("#/") else None
            for step in reference[2:].split("/"):
                target = target.get(step) if isinstance(target, Mapping) else None
            self._references[reference] = self.types(target, depth + 1)
        return self._references[reference]


def _kind_of(value: Any) -> str:
    return "null" if value is None else _KINDS.get(type(value), "string")


def value_as_json(text: str, types: frozenset[str], *, untyped: str) -> str:
    """A value written as plain text, as JSON of a type that fits.

    What the model wrote stays: numbers digit by digit, and text as it is where a string may stand. Only JSON of the
    other allowed types is more than text there: of a parameter that is a string or null, `null` is null, `none` a word.

    Args:
        text: What the model wrote.
        types: Allowed JSON types; empty when unknown.
        untyped: What to take for unknown types: "text", or "json" when it parses.
    """
    if types == {"string"} or (not types and untyped == "text"):
        return json_string(text)
    may_be_text = not types or "string" in types
    if not (may_be_text and text.strip() in _PYTHON_WORDS):
        for dialect in (JSON,) if "string" in types else (JSON, PYTHON):
            written = _literal(text, dialect)
            if written is not None and _fits(_kind_of_literal(written), types):
                return written
    return json_string(text)


def _literal(text: str, dialect: LiteralDialect) -> str | None:
    """A whole value as JSON; None when the text is none."""
    relay = LiteralRelay(dialect)
    given, stop, _ = relay.feed(text.strip())
    given += relay.finish()
    return given if relay.done and not relay.failed and stop == len(text.strip()) else None


def _kind_of_literal(written: str) -> str:
    if written[0] in _KINDS_BY_FIRST:
        return _KINDS_BY_FIRST[written[0]]
    return "integer" if written.lstrip("-").isdigit() else "number"


def _fits(kind: str, types: frozenset[str]) -> bool:
    """A number stays a number where another kind of number was asked for: the client says better what is wrong."""
    if not types:
        return True
    if kind == "string":  # text, then, quotes and all
        return False
    return kind in types or (kind in _NUMBERS and not types.isdisjoint(_NUMBERS))
