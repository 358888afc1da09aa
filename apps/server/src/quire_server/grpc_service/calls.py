"""Who calls, what refuses a call, and how errors are told: what all methods share. Knows no message of a service."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

import grpc
import grpc.aio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire_interfaces import OverloadedError, QuireError
from quire_observability import current_request_id
from quire_server.access_log import AccessLog
from quire_server.callers import Caller
from quire_server.config import ServerConfig
from quire_server.context import ServerContext
from quire_server.errors import HTTPError, error_body, status_of
from quire_server.request_ids import request_id_of

if TYPE_CHECKING:
    from quire_server.tracing import SpanSender

__all__ = ["STATUS_CODES", "CallWatch", "EndlessCalls", "answering", "caller_of", "refuse"]

_logger = logging.getLogger(__name__)

STATUS_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""HTTP status of an error -> status code of the call; INTERNAL for others."""

Service = TypeVar("Service")
Answer = TypeVar("Answer")
RPC = Any
"""A `grpc.aio.ServicerContext`; the library has no types."""
Method = Callable[[Service, Any, RPC], Awaitable[Answer]]


class EndlessCalls:
    """Calls that go on until the client leaves, which must not keep a server that ends."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_over = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around such a call.

        Raises:
            HTTPError: 503, the server ends.
        """
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._is_over:
                raise
            task.uncancel()
            raise HTTPError(503, "the server is shutting down; call another one", code="draining") from None
        finally:
            self._tasks.discard(task)

    def end(self) -> None:
        """End those that run."""
        self._is_over = True
        for task in self._tasks:
            task.cancel()


def caller_of(context: ServerContext, rpc: RPC) -> Caller:
    """Who calls, by the metadata `authorization: Bearer KEY` or `x-api-key: KEY`.

    Raises:
        HTTPError: 401, no key or a wrong one.
    """
    metadata = {name: value for name, value in rpc.invocation_metadata() or () if isinstance(value, str)}
    kind, _, key = metadata.get("authorization", "").partition(" ")
    given = key.strip() if kind.lower() == "bearer" else metadata.get("x-api-key", "").strip()
    caller = context.api_keys.caller_of(given.encode())
    if caller is None:
        what = "is wrong" if given else "is missing"
        raise HTTPError(
            401, f"the API key {what}; send the metadata 'authorization: Bearer KEY'", code="invalid_api_key"
        )
    current_request_id.set(request_id_of(Headers(metadata)))
    return caller


def answering(method: Method[Service, Answer]) -> Method[Service, Answer]:
    """The method, whose errors end the call with the status code that belongs to them. A service with a `watch` has
    its calls logged and traced."""

    @functools.wraps(method)
    async def answered(self: Service, request: Any, rpc: RPC) -> Answer:
        refusal: Exception | None = None
        answer: list[Answer] = []

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal refusal
            try:
                answer.append(await method(self, request, rpc))
            except QuireError as error:
                refusal = error
            except Exception as error:
                _logger.exception("the call of %s failed", method.__name__)
                refusal = error
            await send({"type": "http.response.start", "status": 200 if refusal is None else status_of(refusal)})

        watch: CallWatch | None = getattr(self, "watch", None)
        if watch is None:
            await call({}, _nothing, _unsent)
        else:
            await watch(call)(_scope_of(rpc, f"/{watch.service}/{method.__name__}"), _nothing, _unsent)
        if refusal is not None:
            await refuse(rpc, refusal)
        return answer[0]

    return answered


class CallWatch:
    """The layers of HTTP that log and trace a call, around a call of gRPC: to them it is a POST to `/service/method`
    whose answer has the status of HTTP that belongs to its own.

    Args:
        service: Full name of the service.
        config: What is logged.
        sender: Makes the spans; None where calls are not traced.
        model: Name under which the model is served.
    """

    def __init__(self, service: str, config: ServerConfig, sender: SpanSender | None, model: str) -> None:
        self.service, self._config, self._sender, self._model = service, config, sender, model

    def __call__(self, call: ASGIApp) -> ASGIApp:
        """The call in its layers."""
        if self._config.access_log:
            call = AccessLog(call, self._config.disable_access_log_for_endpoints)
        if self._sender is not None:
            from quire_server.tracing import Tracing  # needs the extra otel

            call = Tracing(call, self._sender, self._model)
        return call


def _scope_of(rpc: RPC, path: str) -> Scope:
    metadata = [(name, value) for name, value in rpc.invocation_metadata() or () if isinstance(value, str)]
    kind, _, address = unquote(rpc.peer() or "").partition(":")
    host, _, port = address.rpartition(":")
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "scheme": "grpc",
        "headers": [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in metadata],
        "client": (host.strip("[]"), int(port)) if kind.startswith("ipv") and port.isdigit() else None,
    }


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


async def _unsent(message: Message) -> None:
    """The answer goes over gRPC."""


async def refuse(rpc: RPC, error: Exception) -> None:
    """End a call with an error. The metadata at its end say what a program may want to know: `error-code` and
    `error-param` as in the bodies of HTTP, and how long to wait (`retry-after` in seconds, and
    `grpc-retry-pushback-ms`, which the retries of gRPC's clients heed)."""
    body = error_body(error)["error"]
    metadata = [
        (name, str(value).encode("ascii", "backslashreplace").decode())
        for name, value in (("error-code", body["code"]), ("error-param", body["param"]))
        if value is not None
    ]
    if isinstance(error, OverloadedError):
        seconds = max(1, math.ceil(error.retry_after_s))
        metadata += [("retry-after", str(seconds)), ("grpc-retry-pushback-ms", str(seconds * 1000))]
    code = STATUS_CODES.get(status_of(error), grpc.StatusCode.INTERNAL)
    await rpc.abort(code, body["message"], tuple(metadata))
