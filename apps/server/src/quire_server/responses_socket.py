"""The Responses API over a websocket: `response.create` messages in, the events of a stream out, one after the other.

Text frames of JSON. Messages that arrive while a response is made wait for their turn, as many as `MAX_WAITING`, and
together no larger than a body may be. A client that leaves ends the response it was reading. The last response that is
not stored can be gone on from over the same connection. Source of the shapes: OpenAI's public API reference.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from quire_interfaces import QuireError, RequestError
from quire_server.body import SMALL_BYTES, parse_body
from quire_server.context import ServerContext, in_thread_when
from quire_server.errors import error_body, status_of
from quire_server.readiness import refuse_while_draining
from quire_server.responses_history import RecentResponse
from quire_server.responses_request import ResponsesRequest
from quire_server.responses_turns import ResponsePreparer

__all__ = ["responses_socket"]

MAX_WAITING = 16
DRAIN_LOOK_S = 0.2
"""How often a connection without a running response looks whether the server drains."""
_logger = logging.getLogger(__name__)


async def responses_socket(preparer: ResponsePreparer, context: ServerContext, socket: WebSocket) -> None:
    """Serve one connection until the client or the server leaves."""
    await socket.accept()
    messages = _Waiting(MAX_WAITING)
    reading = asyncio.ensure_future(_read(socket, messages, context.config.max_body_bytes))
    answering = asyncio.ensure_future(_answer_all(preparer, context, socket, messages))
    try:
        await asyncio.wait((reading, answering), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (reading, answering):
            task.cancel()
        results = await asyncio.gather(reading, answering, return_exceptions=True)
    if results[1] is None:
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):
            await socket.close(1012, "the server is shutting down")
    for result in results:
        if isinstance(result, QuireError):
            with contextlib.suppress(RuntimeError, WebSocketDisconnect):
                await _send_error(socket, result)
                await socket.close(1008)
        elif isinstance(result, Exception) and not isinstance(result, WebSocketDisconnect):
            _logger.error("a websocket failed", exc_info=result)
            with contextlib.suppress(RuntimeError, WebSocketDisconnect):
                await socket.close(1011)


class _Waiting(asyncio.Queue[str]):
    """Messages that wait for their turn, with their length."""

    num_chars = 0

    def _put(self, item: str) -> None:
        super()._put(item)
        self.num_chars += len(item)

    def _get(self) -> str:
        item: str = super()._get()
        self.num_chars -= len(item)
        return item


async def _read(socket: WebSocket, messages: _Waiting, max_bytes: int) -> None:
    """Reads all the time, so that a client that leaves is noticed at once."""
    while True:
        text = await socket.receive_text()
        if len(text) > max_bytes:
            raise RequestError(f"a message is larger than {max_bytes} bytes (--max-body-bytes)", param="body")
        if messages.num_chars + len(text) > max_bytes:
            raise RequestError(
                f"messages of more than {max_bytes} bytes (--max-body-bytes) wait; read the events of a response "
                "before you ask for more",
                param="body",
                code="too_many_messages",
            )
        try:
            messages.put_nowait(text)
        except asyncio.QueueFull:
            raise RequestError(
                f"{MAX_WAITING} messages wait already; read the events of a response before you ask for more",
                param="body",
                code="too_many_messages",
            ) from None


async def _answer_all(
    preparer: ResponsePreparer, context: ServerContext, socket: WebSocket, messages: _Waiting
) -> None:
    recent = RecentResponse()
    while (text := await _next(context, messages)) is not None:
        try:
            context.rate_limiter.admit(context.caller)
            await _answer(preparer, context, socket, text, recent)
        except QuireError as error:
            await _send_error(socket, error)


async def _next(context: ServerContext, messages: asyncio.Queue[str]) -> str | None:
    """The next message; None where there is none and the server drains."""
    getting = asyncio.ensure_future(messages.get())
    try:
        while not getting.done():
            await asyncio.wait((getting,), timeout=DRAIN_LOOK_S)
            if context.state.is_draining and not getting.done():
                return None
        return getting.result()
    finally:
        getting.cancel()


async def _answer(
    preparer: ResponsePreparer, context: ServerContext, socket: WebSocket, text: str, recent: RecentResponse
) -> None:
    refuse_while_draining(context)
    data = text.encode("utf-8", "surrogatepass")
    await context.inspector.check(data)
    body = await in_thread_when(len(data) > SMALL_BYTES, lambda: parse_body(_request(text), ResponsesRequest))
    if body.background:
        raise RequestError("background is not for websockets; leave it out", param="background")
    body.stream = True
    run = await preparer.prepare(context, body, recent)
    async with contextlib.aclosing(run.events()) as batches:
        async for events in batches:
            for event in events:
                await socket.send_text(_encoder.encode(event).decode())


def _request(text: str) -> bytes:
    """The body inside a message.

    Raises:
        RequestError: it is no JSON object of type response.create.
    """
    try:
        message = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"the message is not valid JSON: {error}", param="body", code="invalid_json") from None
    kind = message.get("type") if isinstance(message, dict) else None
    if kind != "response.create":
        raise RequestError(f"type must be 'response.create', got {kind!r:.100}", param="type")
    return msgspec.json.encode({key: value for key, value in message.items() if key not in ("type", "event_id")})


async def _send_error(socket: WebSocket, error: BaseException) -> None:
    fields: dict[str, Any] = {"type": "error", "status": status_of(error), **error_body(error)}
    await socket.send_text(_encoder.encode(fields).decode())


_encoder = msgspec.json.Encoder()
