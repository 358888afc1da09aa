"""Options that change a JSON schema before any backend sees it."""

from __future__ import annotations

import json
from typing import Any

from quire_interfaces import GrammarSpec, RequestError

__all__ = ["schema_of"]

_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")


def schema_of(spec: GrammarSpec) -> Any:
    """The schema of a spec of kind "json", with what its options add.

    Raises:
        RequestError: it is nested too deeply to be read.
    """
    try:
        schema = json.loads(spec.text)
        return schema if spec.additional_properties else _closed(schema)
    except RecursionError:
        raise RequestError(
            "structured_outputs.json is nested too deeply; flatten the schema, or use $ref to $defs",
            param="structured_outputs.json",
            code="grammar_too_large",
        ) from None


def _closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` wherever properties are named and nothing is said about others."""
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for key in _LISTS:
        if isinstance(result.get(key), list):
            result[key] = [_closed(each) for each in result[key]]
    for key in _MAPS:
        if isinstance(result.get(key), dict):
            result[key] = {name: _closed(each) for name, each in result[key].items()}
    for key in _SINGLE:
        if isinstance(result.get(key), dict):
            result[key] = _closed(result[key])
    if "properties" in result and "patternProperties" not in result:
        result.setdefault("additionalProperties", False)
    return result
