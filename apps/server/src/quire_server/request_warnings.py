"""What a server passed over in a request that it otherwise serves, told in the answer instead of refusing the request.

One shape for the three chat protocols: a top-level list `warnings` of the answer, left out where it is empty.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

import msgspec

__all__ = [
    "RequestWarning",
    "duplicate_tool",
    "field_left_out",
    "free_text",
    "hosted_tool",
    "not_stored",
    "warnings_field",
]


class RequestWarning(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was passed over."""

    code: str
    """For programs: "tool_left_out", "duplicate_tool", "grammar_not_enforced", "field_left_out" or "not_stored"."""
    param: str
    """The field, as the client sent it."""
    message: str


def hosted_tool(kind: Any, at: str) -> RequestWarning:
    """A tool that only another server could run, or of a type that is not known here."""
    return RequestWarning(
        code="tool_left_out",
        param=at,
        message=f"{at} of type {reprlib.repr(kind)} was left out: this server does not run such tools",
    )


def duplicate_tool(name: str, at: str) -> RequestWarning:
    """A tool whose name another one has already."""
    return RequestWarning(
        code="duplicate_tool",
        param=at,
        message=f"{at} was left out: an earlier tool has the name {reprlib.repr(name)} already",
    )


def field_left_out(at: str, why: str) -> RequestWarning:
    """A field that asks for what is not done here, and that the answer does not depend on."""
    return RequestWarning(code="field_left_out", param=at, message=f"{at} was left out: {why}")


def free_text(at: str) -> RequestWarning:
    """A grammar that calls of this model are not held to."""
    return RequestWarning(
        code="grammar_not_enforced",
        param=at,
        message=f"{at} was told to the model, but its calls are not held to it: their arguments are no JSON here, or "
        "the server has no backend for grammars",
    )


def not_stored(at: str, message: str) -> RequestWarning:
    """What was generated and answered, but is not kept as the request asked."""
    return RequestWarning(code="not_stored", param=at, message=message)


def warnings_field(warnings: Sequence[RequestWarning]) -> dict[str, Any]:
    """The part of an answer that tells them."""
    return {"warnings": msgspec.to_builtins(list(warnings))} if warnings else {}
