"""The name of a request: the client's own, in its answer, in its headers and in the log. Knows no route."""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers
from starlette.requests import Request

__all__ = ["MAX_ID_CHARS", "answer_id", "request_id_of"]

MAX_ID_CHARS = 256


def request_id_of(headers: Headers) -> str:
    """`X-Request-Id`, or a new id where the client sent none."""
    return (headers.get("x-request-id") or secrets.token_hex(12))[:MAX_ID_CHARS]


def answer_id(request: Request, prefix: str, named: str | None = None) -> str:
    """The id of an answer: that of its request behind a prefix, e.g. "chatcmpl-".

    Args:
        request: Its header `X-Request-Id` comes first.
        prefix: Of the route's ids.
        named: The id in the request's body, if there is one.
    """
    own_id: str = request.state.request_id
    is_own = bool(request.headers.get("x-request-id"))
    return prefix + (own_id if is_own or named is None else named)
