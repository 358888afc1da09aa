"""Random JSON schemas whose values are short: for tests of constrained outputs. Standard library only.

Every schema can be satisfied, and every value of it ends within some hundred characters, so that a random model can
finish it. Values are judged by a validator that the tests bring.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

__all__ = ["random_schema"]

Schema = dict[str, Any]

_PATTERNS = ("^[a-z]{1,4}$", "^[A-Z][a-z]{0,3}-[0-9]{2}$", "^(red|green|blue)$", "^a?b{2}c*d$", '^[^0-9"\\\\]{0,5}$')
_FORMATS = ("ipv4", "uuid")
_NAMES = ("id", "name", "first name", "tags", "größe", "a", "value_1", "$price", "x-y", "items", "日本")
_VALUES: tuple[Any, ...] = (None, True, False, 0, -3, 17, 2.5, "red", "two words", "ünï\n", "", [1, "a"], {"k": None})


def random_schema(seed: int) -> Schema:
    """A schema of draft 2020-12, always the same for a seed."""
    rng = random.Random(seed)
    schema = _any(rng, 0)
    if rng.random() < 0.25:
        schema = _with_definitions(rng, schema)
    if rng.random() < 0.3:
        schema = {"title": "Example", "description": "A random schema.", **schema}
    return schema


def _any(rng: random.Random, depth: int) -> Schema:
    makers: list[Callable[[random.Random, int], Schema]] = [_string, _integer, _number, _simple, _choice, _nullable]
    if depth < 3:
        makers += [_object, _object, _object, _array, _array, _tuple, _union]
    return rng.choice(makers)(rng, depth)


def _string(rng: random.Random, depth: int) -> Schema:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(_PATTERNS), "maxLength": 8}
    if kind == 1:
        return {"type": "string", "format": rng.choice(_FORMATS)}
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
    return {"enum": [low, round(low + 1.5, 2)]} if rng.random() < 0.5 else {"type": "number", "enum": [low, 1e6, -0.25]}


def _simple(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "null"])}


def _choice(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.3:
        return {"const": rng.choice(_VALUES)}
    return {"enum": rng.sample(_VALUES, rng.randint(1, 5))}


def _nullable(rng: random.Random, depth: int) -> Schema:
    return {"type": ["boolean", "null"]}


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
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _union(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth + 1) for _ in range(rng.randint(2, 3))]}


def _with_definitions(rng: random.Random, schema: Schema) -> Schema:
    """The schema used twice through a reference, in a list that may hold lists of the same kind."""
    node = {
        "type": "object",
        "properties": {
            "value": {"$ref": "#/$defs/leaf"},
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {"$defs": {"leaf": schema, "node": node}, "$ref": "#/$defs/node"}
