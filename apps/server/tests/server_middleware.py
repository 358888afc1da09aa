"""Middleware of an operator's, for the tests."""

from __future__ import annotations

from typing import Any

from starlette.responses import PlainTextResponse

VALUE = 5


class Stamp:
    """Adds a header to every answer."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def stamped(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-stamp", b"seen")]
            await send(message)

        await self.app(scope, receive, stamped)


async def refuse_teapots(request: Any, call_next: Any) -> Any:
    if "teapot" in request.headers:
        return PlainTextResponse("no", 418)
    return await call_next(request)
