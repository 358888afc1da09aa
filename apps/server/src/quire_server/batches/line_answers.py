"""One line of a batch, answered by the handler of its route as a request over HTTP would be.

What passes (a full queue, an engine that is started again, a server that sleeps) is no answer: the line is to be tried
again. Knows no file.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire_interfaces import OverloadedError, QuireError
from quire_observability import current_request_id
from quire_server.callers import Caller
from quire_server.context import ServerContext
from quire_server.errors import error_response, status_of

__all__ = ["BATCH_ENDPOINTS", "LineAnswer", "LineAnswerer", "TryAgainError"]

_logger = logging.getLogger(__name__)

Handler = Callable[[ServerContext, Request], Awaitable[Response]]

BATCH_ENDPOINTS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank",
    "/v1/score", "/v1/classify", "/v2/embed", "/v2/rerank", "/rerank", "/score", "/classify", "/pooling",
    "/inference/v1/generate", "/v1/messages/count_tokens", "/tokenize",
)  # fmt: skip
"""Routes that a line may name."""

LOWEST_PRIORITY = 1 << 30
"""Of lines, where requests have priorities: behind all others."""
RETRY_S = 0.2


class LineAnswer(NamedTuple):
    """What a route answered."""

    status: int
    body: bytes
    """JSON."""


class TryAgainError(Exception):
    """The line is not answered; it may be later.

    Args:
        delay_s: When to try.
    """

    def __init__(self, delay_s: float = RETRY_S) -> None:
        super().__init__()
        self.delay_s = delay_s


class _Asked(msgspec.Struct):
    """What of a body cannot be had in a batch."""

    stream: Any = None
    background: Any = None
    encoding_format: Any = None


class _Choice(msgspec.Struct):
    finish_reason: Any = None


class _Given(msgspec.Struct):
    """What of an answer tells that the server ended it."""

    choices: list[_Choice] = []
    stop_reason: Any = None
    status: Any = None
    error: Any = None


_asked, _given = msgspec.json.Decoder(_Asked), msgspec.json.Decoder(_Given)


class LineAnswerer:
    """Answers lines for one caller.

    Args:
        context: Of the server.
        handlers: Path -> handler, of the routes that lines may name.
        caller: Whose lines they are.
    """

    def __init__(self, context: ServerContext, handlers: Mapping[str, Handler], caller: Caller) -> None:
        self._context, self._handlers, self._caller = context, handlers, caller
        self._has_priorities = context.llm.config.scheduler.policy == "priority"

    async def answer(self, url: str, request_id: str, body: bytes) -> LineAnswer:
        """What the route says to this body.

        Args:
            url: Path of the route.
            request_id: Named in the answer and in the log.
            body: A JSON object.

        Raises:
            TryAgainError: the server cannot say now.
        """
        refusal = _refusal(url, body)
        if refusal is not None:
            return LineAnswer(400, refusal)
        request = self._request(url, request_id, self._behind_others(url, body))
        current_request_id.set(request_id)
        try:
            response = await self._handlers[url](self._context.of_caller(self._caller), request)
        except OverloadedError as error:
            raise TryAgainError(max(RETRY_S, error.retry_after_s)) from None
        except QuireError as error:
            if status_of(error) == 503:
                raise TryAgainError from None
            response = error_response(error, request.scope)
        except Exception as error:
            _logger.exception("line %s of a batch failed", request_id)
            response = error_response(error, request.scope)
        answer = bytes(response.body)
        if response.status_code == 200 and _was_ended(answer):
            raise TryAgainError
        return LineAnswer(response.status_code, answer)

    def check_alive(self) -> None:
        """Raises EngineDeadError when trying again is of no use."""
        self._context.llm.client.check_health()

    def _behind_others(self, url: str, body: bytes) -> bytes:
        """The body with the lowest priority, on a server that has priorities."""
        if not self._has_priorities or url in ("/tokenize", "/v1/messages/count_tokens"):
            return body
        try:
            fields = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return body  # the route says what is wrong
        own = fields.get("priority")
        is_number = isinstance(own, int) and not isinstance(own, bool)
        if own is None or is_number:
            fields["priority"] = LOWEST_PRIORITY + max(0, min(own or 0, LOWEST_PRIORITY))
        return msgspec.json.encode(fields)

    def _request(self, url: str, request_id: str, body: bytes) -> Request:
        has_come = False

        async def receive() -> Any:
            nonlocal has_come
            if has_come:
                await asyncio.Event().wait()  # nobody leaves
            has_come = True
            return {"type": "http.request", "body": body, "more_body": False}

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": url,
            "raw_path": url.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
            "client": None,
            "server": None,
            "state": {"request_id": request_id, "caller": self._caller},
        }
        return Request(scope, receive)


def _refusal(url: str, body: bytes) -> bytes | None:
    """The error body of what no batch can do; None for the rest."""
    if url not in BATCH_ENDPOINTS:
        return _error_body(f"url must be one of {', '.join(BATCH_ENDPOINTS)}, got {url[:200]!r}", "url")
    try:
        asked = _asked.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # the route says what is wrong
    if asked.stream:
        return _error_body("a line of a batch is answered as a whole: leave stream out", "stream")
    if asked.background and url == "/v1/responses":
        return _error_body("a line of a batch runs in the background already: leave background out", "background")
    if asked.encoding_format in ("bytes", "bytes_only"):
        return _error_body("results are JSON: ask for the encoding_format float or base64", "encoding_format")
    return None


def _error_body(message: str, param: str) -> bytes:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": "unsupported_in_batch"}
    return msgspec.json.encode({"error": error})


def _was_ended(answer: bytes) -> bool:
    """Whether the server ended the request before its answer was whole: it was paused, or is about to stop."""
    try:
        given = _given.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False  # of another shape, which has no such ends
    has_aborted = any(choice.finish_reason == "abort" for choice in given.choices)
    is_cut = (
        given.status == "incomplete" and isinstance(given.error, dict) and given.error.get("code") == "server_error"
    )
    return has_aborted or given.stop_reason == "pause_turn" or is_cut
