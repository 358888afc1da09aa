"""POST /sleep and /wake_up, GET /is_sleeping: a server that gives memory back while nobody needs it."""

from __future__ import annotations

import reprlib

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire_interfaces import RequestError
from quire_server.context import ServerContext

__all__ = ["is_sleeping", "sleep", "wake_up"]


async def sleep(context: ServerContext, request: Request) -> Response:
    """`?level=0` holds requests, `?level=1` (the default) refuses them and gives the KV cache's memory back."""
    text = request.query_params.get("level", "1")
    if text not in ("0", "1", "2"):
        raise RequestError(f"level must be 0 or 1, got {reprlib.repr(text)}", param="level")
    level = int(text)
    was_asleep, context.is_asleep = context.is_asleep, context.is_asleep or level > 0
    try:
        given_back = await context.llm.sleep(level)
    except BaseException:
        context.is_asleep = was_asleep
        raise
    context.is_asleep = level > 0
    return JSONResponse({"level": level, "bytes_given_back": given_back})


async def wake_up(context: ServerContext, request: Request) -> Response:
    """Take requests again; those that waited go on."""
    await context.llm.wake_up()
    context.is_asleep = False
    return Response()


async def is_sleeping(context: ServerContext, request: Request) -> Response:
    """In vLLM's shape, with the level."""
    level = await context.llm.sleep_level()
    return JSONResponse({"is_sleeping": level is not None, "level": level})
