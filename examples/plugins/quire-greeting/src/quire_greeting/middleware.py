"""`--middleware quire_greeting.middleware.greet`: a header on every answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

__all__ = ["greet"]


async def greet(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """Let the server answer, and greet."""
    response = await call_next(request)
    response.headers["X-Greeting"] = "hello"
    return response
