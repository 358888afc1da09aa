"""Where in a constraint that is refused the reason lies, for the message to whoever sent it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from quire_interfaces import GrammarSpec
from quire_structured_output.schema_options import LIST_KEYWORDS, MAP_KEYWORDS

__all__ = ["RefusedPart", "refused_part"]

MAX_SEARCH_S = 0.05
"""Processor time of a search, after which the place is as exact as it has become."""

_SINGLE = ("items", "additionalProperties", "contains", "propertyNames")

_NOTHING_FITS = "Unsatisfiable schema"

Reason = Callable[[Any], str | None]
"""Why a schema is refused; None where it is not."""


class RefusedPart(NamedTuple):
    """A place in a constraint."""

    pointer: str
    """JSON pointer within the schema."""
    reason: str
    origin: str | None = None
    """What the client calls the schema, where it is a part of a structural tag that says so ("origin")."""


def refused_part(spec: GrammarSpec, reason_of: Reason) -> RefusedPart | None:
    """The smallest schema of a constraint that is refused by itself, and the keyword of it if there is one.

    Args:
        spec: A constraint that is refused.
        reason_of: Compiles a schema.

    Returns:
        None where no schema of it is refused by itself.
    """
    deadline_s = time.thread_time() + MAX_SEARCH_S
    try:
        value = json.loads(spec.text)
        schemas = [(None, value)] if spec.kind == "json" else list(_tagged_schemas(value))
        for origin, schema in schemas:
            reason = reason_of(schema)
            if reason is not None:
                pointer, reason = _smallest(schema, reason, reason_of, deadline_s)
                return RefusedPart(pointer, reason, origin)
            if time.thread_time() > deadline_s:
                break
    except (ValueError, RecursionError):
        pass
    return None


def _tagged_schemas(value: Any) -> Iterator[tuple[str | None, Any]]:
    """The schemas of a structural tag, with what the client calls each."""
    if isinstance(value, dict):
        if value.get("type") == "json_schema":
            origin = value.get("origin")
            yield origin if isinstance(origin, str) else None, value.get("json_schema")
        elif "begin" in value and "schema" in value:
            yield None, value["schema"]
        else:
            for each in value.values():
                yield from _tagged_schemas(each)
    elif isinstance(value, list):
        for each in value:
            yield from _tagged_schemas(each)


def _smallest(root: Any, reason: str, reason_of: Reason, deadline_s: float) -> tuple[str, str]:
    """Pointer to the place, and what is said of it alone."""
    pointer, node = "", root
    nothing_fits = reason.startswith(_NOTHING_FITS)
    definitions = {key: root[key] for key in ("$defs", "definitions") if isinstance(root, dict) and key in root}
    going = True
    while going and time.thread_time() < deadline_s:
        going = False
        for place, child in _children(node):
            alone = {**definitions, **child} if isinstance(child, dict) else child
            part_reason = reason_of(alone)
            if part_reason == reason or (
                nothing_fits and part_reason is not None and part_reason.startswith(_NOTHING_FITS)
            ):
                pointer, node, reason, going = pointer + place, child, part_reason or reason, True
                break
            if time.thread_time() > deadline_s:
                break
    if isinstance(node, dict) and not nothing_fits:
        for key in node:
            without = {**definitions, **{name: value for name, value in node.items() if name != key}}
            if key not in definitions and time.thread_time() < deadline_s and reason_of(without) != reason:
                return f"{pointer}/{_escaped(key)}", reason
    return pointer, reason


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(node, dict):
        return
    for key in _SINGLE:
        if isinstance(node.get(key), dict):
            yield f"/{key}", node[key]
    for key in MAP_KEYWORDS:
        if isinstance(node.get(key), dict):
            for name, value in node[key].items():
                yield f"/{key}/{_escaped(name)}", value
    for key in LIST_KEYWORDS:
        if isinstance(node.get(key), list):
            for index, value in enumerate(node[key]):
                yield f"/{key}/{index}", value


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
