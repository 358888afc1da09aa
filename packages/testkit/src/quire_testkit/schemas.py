"""Random JSON schemas whose values are short: for tests of constrained outputs. Standard library only.

Every schema can be satisfied, and nearly every value of it ends within some hundred characters, so that a random model
can finish it. Together the schemas have every keyword of draft 2020-12 that llguidance follows, and every format.
Values are judged by a validator that the tests bring. `UNSUPPORTED` has the keywords and formats that it does not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["UNSUPPORTED", "keywords_of", "random_schema"]

Schema = dict[str, Any]

_PATTERNS = ("^[a-z]{1,4}$", "^[A-Z][a-z]{0,3}-[0-9]{2}$", "^(red|green|blue)$", "^a?b{2}c*d$", '^[^0-9"\\\\]{0,5}$')
_FORMATS: tuple[Schema, ...] = (
    *({"format": name} for name in ("ipv4", "ipv6", "uuid", "date", "time", "date-time")),
    {"format": "duration", "maxLength": 12},
    {"format": "email", "maxLength": 12},
    {"format": "hostname", "maxLength": 8},
    {"format": "uri", "maxLength": 16},
)
_NAMES = ("id", "name", "first name", "tags", "größe", "a", "value_1", "$price", "x-y", "items", "日本")
_VALUES: tuple[Any, ...] = (None, True, False, 0, -3, 17, 2.5, "red", "two words", "ünï\n", "", [1, "a"], {"k": None})


def random_schema(seed: int) -> Schema:
    """A schema of draft 2020-12, always the same for a seed."""
    rng = random.Random(seed)
    schema = _any(rng, 0)
    if rng.random() < 0.25:
        schema = _with_definitions(rng, schema)
    if rng.random() < 0.3:
        schema = {**_ANNOTATIONS, **schema}
    return schema


def keywords_of(schema: object) -> Iterator[str]:
    """The keywords of a schema and of the schemas in it; formats as "format: NAME"."""
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        yield f"format: {value}" if key == "format" else key
        if key in ("allOf", "anyOf", "oneOf", "prefixItems"):
            parts = value
        elif key in ("properties", "patternProperties", "$defs", "dependentSchemas"):
            parts = value.values()
        else:
            parts = () if key in ("const", "enum", "default", "examples") else (value,)
        for part in parts:
            yield from keywords_of(part)


def _any(rng: random.Random, depth: int) -> Schema:
    makers: list[Callable[[random.Random, int], Schema]] = [_string, _integer, _number, _simple, _choice, _types, _all]
    if depth < 3:
        makers += [_object, _object, _object, _array, _array, _tuple, _union, _one, _map]
    return rng.choice(makers)(rng, depth)


def _string(rng: random.Random, depth: int) -> Schema:
    kind = rng.randrange(7)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(_PATTERNS), "maxLength": 8}
    if kind == 4:
        return {"type": "string", "contentEncoding": "base64", "contentMediaType": "text/plain", "maxLength": 8}
    if kind in (1, 2, 3):
        return {"type": "string", **rng.choice(_FORMATS)}
    low = rng.randrange(4)
    schema: Schema = {"type": "string", "maxLength": low + rng.randrange(6)}
    if low:
        schema["minLength"] = low
    return schema


def _integer(rng: random.Random, depth: int) -> Schema:
    low = rng.randrange(-200, 200)
    high = low + rng.randrange(1, 300)
    schema: Schema = {"type": "integer"}
    schema["minimum" if rng.random() < 0.7 else "exclusiveMinimum"] = low - 1
    schema["maximum" if rng.random() < 0.7 else "exclusiveMaximum"] = high + 1
    return schema


def _number(rng: random.Random, depth: int) -> Schema:
    low = round(rng.uniform(-50, 50), 2)
    kind = rng.randrange(4)
    if kind == 0:  # a number between bounds alone may have digits without end
        return {"type": "number", "minimum": low, "exclusiveMaximum": low + 3, "multipleOf": rng.choice([0.5, 0.25])}
    if kind == 1:
        return {"type": "integer", "multipleOf": rng.choice([2, 7]), "minimum": 0, "maximum": 99}
    return {"enum": [low, round(low + 1.5, 2)]} if rng.random() < 0.5 else {"type": "number", "enum": [low, 1e6, -0.25]}


def _simple(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "null"])}


def _choice(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.3:
        return {"const": rng.choice(_VALUES)}
    return {"enum": rng.sample(_VALUES, rng.randint(1, 5))}


def _types(rng: random.Random, depth: int) -> Schema:
    """Keywords that speak of one type only, beside several types."""
    if rng.random() < 0.3:
        return {"type": ["boolean", "null"]}
    return {"type": ["string", "integer", "null"], "minLength": 1, "maxLength": 5, "minimum": 3, "maximum": 70}


def _all(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.5:
        return {"allOf": [{"type": "integer", "minimum": rng.randrange(9)}, {"multipleOf": 4}, {"maximum": 60}]}
    return {"type": "string", "allOf": [{"pattern": "^[a-f]"}, {"pattern": "[0-9]$"}], "maxLength": 6}


def _one(rng: random.Random, depth: int) -> Schema:
    """Alternatives that a constant tells apart, as in a tagged union."""
    tags = rng.sample(_NAMES, 3)
    parts = [_closed_object({"kind": {"const": tag}, "value": _any(rng, depth + 1)}) for tag in tags]
    return {"oneOf": parts}


def _map(rng: random.Random, depth: int) -> Schema:
    """Properties whose names are not known before."""
    schema: Schema = {"type": "object", "maxProperties": rng.randint(1, 3)}
    if depth == 0 and rng.random() < 0.1:  # names without bounds
        return {**schema, "maxProperties": 1, "additionalProperties": _simple(rng, depth + 1)}
    schema |= {"patternProperties": {"^x[a-z]{0,2}$": _any(rng, depth + 2), "^[0-9]$": _simple(rng, depth)}}
    schema |= {"additionalProperties": False, "minProperties": rng.randrange(2)}
    if rng.random() < 0.5:
        schema |= {"properties": {"id": _simple(rng, depth)}, "required": ["id"]}
    return schema


def _closed_object(properties: dict[str, Schema]) -> Schema:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_NAMES, rng.randint(0, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }
    if not schema["required"] and rng.random() < 0.5:
        del schema["required"]
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    low = rng.randrange(3)
    schema: Schema = {"type": "array", "items": _any(rng, depth + 1), "maxItems": low + rng.randrange(3)}
    if low:
        schema["minItems"] = low
    return schema


def _tuple(rng: random.Random, depth: int) -> Schema:
    items = [_any(rng, depth + 1) for _ in range(rng.randint(1, 3))]
    schema = {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    return schema if rng.random() < 0.7 else {**schema, "items": _simple(rng, depth), "maxItems": len(items) + 2}


def _union(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth + 1) for _ in range(rng.randint(2, 3))]}


def _with_definitions(rng: random.Random, schema: Schema) -> Schema:
    """The schema used twice through a reference, in a list that may hold lists of the same kind."""
    leaf = "#/$defs/leaf"
    if rng.random() < 0.3:
        leaf, schema = "#leaf", {**schema, "$anchor": "leaf"}
    node = _closed_object({"value": {"$ref": leaf}, "next": {"anyOf": [{"type": "null"}, {"$ref": leaf}]}})
    return {"$defs": {"leaf": schema, "node": node}, "$ref": "#/$defs/node"}


_ANNOTATIONS: Schema = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": "https://example.org/random",
    "$comment": "Annotations forbid nothing.",
    "title": "Example",
    "description": "A random schema.",
    "default": None,
    "examples": [1],
    "deprecated": True,
    "readOnly": False,
    "writeOnly": False,
}

UNSUPPORTED: dict[str, Schema] = {
    "$dynamicRef": {"$dynamicRef": "#x"},
    "contains": {"type": "array", "contains": {"const": 1}, "maxItems": 3},
    "minContains": {"type": "array", "contains": {"const": 1}, "minContains": 2, "maxItems": 3},
    "maxContains": {"type": "array", "contains": {"const": 1}, "maxContains": 2, "maxItems": 3},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}, "maxProperties": 2},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"maxProperties": 1}}, "maxProperties": 2},
    "if": {"if": {"type": "null"}, "then": {"const": None}, "else": {"type": "boolean"}},
    "not": {"not": {"type": "string"}, "type": ["boolean", "null"]},
    "oneOf": {"oneOf": [{"type": "number"}, {"type": "integer"}]},
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 3}, "maxProperties": 2},
    "maxProperties": {"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "uniqueItems": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 3, "uniqueItems": True},
    **{
        name: {"type": "string", "format": name, "maxLength": 9}
        for name in (
            "idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer",
            "uri-reference", "uri-template", "no-such-format",
        )
    },
}  # fmt: skip
"""By keyword or format: a schema that a backend follows, or refuses by that name. Each can be satisfied."""
