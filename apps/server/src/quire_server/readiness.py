"""GET /health, /ping and /ready: whether this process is to be started again, and whether it is to be sent requests."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire_server.context import ServerContext
from quire_server.errors import HTTPError

__all__ = ["ConnectionCloser", "check_ready", "health", "ready", "refuse_while_draining"]


async def health(context: ServerContext, request: Request) -> Response:
    """200 with an empty body unless the engine is gone, or stalled: has requests, but takes no step."""
    _check_alive(context)
    return Response()


def _check_alive(context: ServerContext) -> None:
    for client in (llm.client for llm in context.llms):
        client.check_health()
        if client.is_stalled:
            raise HTTPError(
                503,
                f"the engine is stalled: it has requests, but has taken no step for {client.stalled_s:.0f} s "
                "(--stall-timeout-s)",
                code="engine_stalled",
            )


async def ready(context: ServerContext, request: Request) -> Response:
    """200 with an empty body while requests are welcome: not while the server shuts down, its engine is started again,
    is paused, sleeps, is stalled or is gone."""
    check_ready(context)
    return Response()


def check_ready(context: ServerContext) -> None:
    """Raises EngineDeadError or HTTPError (503) while requests are not welcome."""
    _check_alive(context)
    if context.state.is_leaving:
        raise HTTPError(503, "the server is shutting down", code="draining")
    if any(llm.client.is_loading for llm in context.llms):
        raise HTTPError(503, "the engine is being started again", code="loading")
    if context.state.is_asleep:
        raise HTTPError(503, "the server sleeps; wake it with POST /wake_up", code="sleeping")
    if context.llm.client.is_resting:
        raise HTTPError(503, "the engine holds requests until POST /resume or /wake_up", code="paused")


def refuse_while_draining(context: ServerContext) -> None:
    """Raises HTTPError when the server takes no new requests."""
    if context.state.is_draining:
        raise HTTPError(
            503,
            "the server is shutting down; send the request to another one",
            code="draining",
            headers={"retry-after": "1"},
        )


class ConnectionCloser:
    """The ASGI layer that ends connections with their next answer when the server is about to leave."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app, self._context = app, context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._context.state.is_leaving:
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self._app(scope, receive, send_closing)
