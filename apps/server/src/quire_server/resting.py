"""POST /sleep and /wake_up, GET /is_sleeping: a server that gives memory back while nobody needs it; POST /pause,
/resume and /reset_prefix_cache, GET /is_paused: one that holds requests, or forgets what it has computed."""

from __future__ import annotations

import asyncio
import reprlib

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire.sleep_tags import checked_tags
from quire_interfaces import RequestError
from quire_server.context import ServerContext
from quire_server.errors import HTTPError

__all__ = [
    "is_paused",
    "is_sleeping",
    "pause",
    "reset_encoder_cache",
    "reset_mm_cache",
    "reset_prefix_cache",
    "resume",
    "sleep",
    "wake_up",
]


async def sleep(context: ServerContext, request: Request) -> Response:
    """`?level=0` holds requests, `?level=1` (the default) refuses them and gives the KV cache's memory back, `?level=2`
    that of the weights as well; `?mode=` keep (the default), wait or abort says what becomes of those that run."""
    text = request.query_params.get("level", "1")
    if text not in ("0", "1", "2"):
        raise RequestError(f"level must be 0, 1 or 2, got {reprlib.repr(text)}", param="level")
    level, mode = int(text), request.query_params.get("mode", "keep")
    was_asleep, context.state.is_asleep = context.state.is_asleep, context.state.is_asleep or level > 0
    client = context.llm.client
    try:
        if mode != "keep":
            await client.pause(mode)  # type: ignore[arg-type]  # the engine refuses other texts
        given_back = await client.sleep(level)
    except BaseException:
        context.state.is_asleep = was_asleep
        if mode in ("wait", "abort") and not was_asleep:
            await client.resume()
        raise
    context.state.is_asleep = level > 0
    return JSONResponse({"level": level, "bytes_given_back": given_back})


async def wake_up(context: ServerContext, request: Request) -> Response:
    """Take requests again; those that waited go on. `?tags=` names parts as in vLLM: weights, which alone are loaded
    where level 2 has discarded them, kv_cache or scheduling."""
    context.state.is_asleep = bool(await context.llm.client.wake_up(checked_tags(request.query_params.getlist("tags"))))
    return Response()


async def is_sleeping(context: ServerContext, request: Request) -> Response:
    """In vLLM's shape, with the level."""
    level = await context.llm.client.sleep_level()
    return JSONResponse({"is_sleeping": level is not None, "level": level})


async def pause(context: ServerContext, request: Request) -> Response:
    """`?mode=` keep, wait or abort (the default): see `AsyncEngine.pause`. Forgets cached prefixes, but for
    `?clear_cache=false`."""
    mode = request.query_params.get("mode", "abort")
    await context.llm.client.pause(mode, clear_cache=_switch(request, "clear_cache", True))  # type: ignore[arg-type]  # pause checks it
    return JSONResponse({"status": "paused"})


async def resume(context: ServerContext, request: Request) -> Response:
    """Go on with what was held."""
    await context.llm.client.resume()
    return JSONResponse({"status": "resumed"})


async def is_paused(context: ServerContext, request: Request) -> Response:
    """Whether new requests are held; so they are while the server sleeps."""
    return JSONResponse({"is_paused": await context.llm.client.is_paused()})


async def reset_prefix_cache(context: ServerContext, request: Request) -> Response:
    """Forget cached prefixes, but for those on disk; with `?reset_running_requests=true` also while requests hold some,
    which are computed anew then."""
    if _switch(request, "reset_external", False):
        raise RequestError(
            "prefixes on disk are not forgotten: stop the server, and remove the folder of --kv-disk-path",
            param="reset_external",
            code="unsupported",
        )
    preempt = _switch(request, "reset_running_requests", False)
    if not await context.llm.client.reset_prefix_cache(preempt_running=preempt):
        raise HTTPError(
            409, "requests hold blocks of the KV cache; try again, or with ?reset_running_requests=true", code="busy"
        )
    return Response()


async def reset_mm_cache(context: ServerContext, request: Request) -> Response:
    """Forget prepared media that no request holds."""
    if context.llm.media is not None:
        await asyncio.to_thread(context.llm.media.reset)
    return Response()


async def reset_encoder_cache(context: ServerContext, request: Request) -> Response:
    """Forget the embeddings that towers have made of media; what running requests need stays, and is told."""
    if not await context.llm.client.reset_encoder_cache():
        raise HTTPError(409, "running requests need some of the embeddings; the others are forgotten", code="busy")
    return Response()


def _switch(request: Request, name: str, default: bool) -> bool:
    text = request.query_params.get(name, str(default)).lower()
    if text not in ("true", "false", "1", "0"):
        raise RequestError(f"{name} must be true or false, got {reprlib.repr(text)}", param=name)
    return text in ("true", "1")
