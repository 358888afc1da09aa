"""What the offered tools say about the types of their parameters.

Knows JSON schema as far as a type can be read off it; refuses nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        key = (tool, id(schema))
        if key not in self._types_of:
            self._types_of[key] = schema, _TypeReader(self.parameters(tool)).types(schema)
        return self._types_of[key][1]

    def child(self, tool: str, schema: Mapping[str, Any], key: str | None) -> Mapping[str, Any]:
        """What a part of a tool's schema says about the value of a key, or about the items of a list; empty when
        nothing is known.

        Args:
            tool: Its name.
            schema: The part.
            key: None for the items.
        """
        place = (tool, id(schema), key)
        if place not in self._children:
            reader = _ChildReader(self.parameters(tool))
            if key is None:
                found = reader.child(schema, lambda part: part.get("items"))
            else:
                found = reader.child(schema, functools.partial(_property, key))
                found = reader.child(schema, lambda part: part.get("additionalProperties")) if found is None else found
            self._children[place] = schema, {} if found is None else found
        return self._children[place][1]

    # With the schemas, whose ids stay theirs while they are kept.

    @functools.cached_property
    def _types_of(self) -> dict[tuple[str, int], tuple[Mapping[str, Any], frozenset[str]]]:
        return {}

    @functools.cached_property
    def _children(self) -> dict[tuple[str, int, str | None], tuple[Mapping[str, Any], Mapping[str, Any]]]:
        return {}

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
            self._references[reference] = self.types(_target(self._root, reference), depth + 1)
        return self._references[reference]


class _ChildReader:
    """Looks for what a schema says about what stands in a value, following references, alternatives and conjunctions.

    For one way of looking only: what a reference leads to is kept.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root

    def child(self, schema: Any, look: Callable[[Mapping[str, Any]], Any]) -> Mapping[str, Any] | None:
        """What `look` finds in a schema or in its parts, None when it finds nothing."""
        return self._child(schema, look, {}, 0)

    def _child(
        self,
        schema: Any,
        look: Callable[[Mapping[str, Any]], Any],
        references: dict[str, Mapping[str, Any] | None],
        depth: int,
    ) -> Mapping[str, Any] | None:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return None
        own = look(schema)
        found = [own] if isinstance(own, Mapping) else []
        for word in ("anyOf", "oneOf", "allOf"):
            parts = schema[word] if isinstance(schema.get(word), list) else []
            children = [self._child(part, look, references, depth + 1) for part in parts]
            known = [child for child in children if child is not None]
            if known:
                found.append(known[0] if len(known) == 1 else {"allOf" if word == "allOf" else "anyOf": known})
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if reference not in references:
                references[reference] = None  # while it is being read
                references[reference] = self._child(_target(self._root, reference), look, references, depth + 1)
            child = references[reference]
            found += [child] if child is not None else []
        return {"allOf": found} if len(found) > 1 else found[0] if found else None


def _property(key: str, schema: Mapping[str, Any]) -> Any:
    properties = schema.get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else None


def _target(root: Mapping[str, Any], reference: str) -> Any:
    """What a reference to a part of the same schema means."""
    target: Any = root if reference.startswith("#/") else None
    for step in reference[2:].split("/"):
        target = target.get(step) if isinstance(target, Mapping) else None
    return target


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
