"""What a client keeps about requests in flight: their streams and their times.

A stream never loses a token and never grows without bound: news that its reader has not taken yet are merged into one
output per request. Knows asyncio; knows no sockets and no text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quire_engine.messages import AddRequest, merge_outputs
from quire_interfaces import EngineCoreOutput

__all__ = ["InFlight", "OutputStream", "RequestMetrics"]


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to one request, in `time.monotonic()` seconds as seen by the client; 0.0 is "not yet"."""

    arrival_time_s: float = 0.0
    scheduled_time_s: float = 0.0
    """First entered a row."""
    first_token_time_s: float = 0.0
    last_token_time_s: float = 0.0
    finished_time_s: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    max_tokens: int = 0
    n: int = 1
    """Completions asked for by the request this one belongs to."""


class OutputStream:
    """The outputs of one or several requests, in order of arrival per request. One reader.

    `async for` ends when every request has finished. Leave it early with `close`, which aborts what still runs.

    Args:
        request_ids: The requests of this stream.
        abort: Called with the ids still alive when the reader goes away.
    """

    def __init__(self, request_ids: Iterable[str], abort: Callable[[list[str]], None]) -> None:
        self._alive = dict.fromkeys(request_ids)
        self._abort = abort
        self._pending: dict[str, EngineCoreOutput] = {}
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def push(self, output: EngineCoreOutput) -> None:
        """Take in news of one of the requests (called by the client)."""
        held = self._pending.get(output.request_id)
        if held is None:
            self._pending[output.request_id] = output
        else:
            merge_outputs(held, output)
        if output.finish_reason is not None:
            self._alive.pop(output.request_id, None)
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream with an error; news that came before are still given out."""
        self._error = error
        self._wake()

    @property
    def alive(self) -> list[str]:
        """Requests that have not finished."""
        return list(self._alive)

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> EngineCoreOutput:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._alive:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        request_id = next(iter(self._pending))
        return self._pending.pop(request_id)

    def close(self) -> None:
        """The reader goes away: abort what still runs. Idempotent."""
        alive = list(self._alive)
        self._alive.clear()
        self._pending.clear()
        if alive:
            self._abort(alive)
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


@dataclass(slots=True)
class InFlight:
    """One request the engine core knows: where its news go, and what is needed to start it again elsewhere."""

    request: AddRequest
    stream: OutputStream
    metrics: RequestMetrics
    token_ids: list[int]
    """Output tokens so far; kept only when a dead engine would be restarted."""
    num_deaths: int = 0
    """Engine processes that died while it was in flight."""
