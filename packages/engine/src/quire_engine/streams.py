"""The stream through which a reader gets the outputs of its requests from a client.

A stream never loses a token and never grows without bound: outputs that its reader has not taken yet are merged into
one per request. Knows asyncio; knows no sockets and no text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from quire_engine.messages import merge_outputs
from quire_engine.metrics import RequestMetrics
from quire_interfaces import EngineCoreOutput

__all__ = ["OutputStream"]


class OutputStream:
    """The outputs of one or several requests, in order of arrival per request. One reader.

    `async for` ends when every request has finished. Leave it early with `close`, which aborts what still runs.

    Args:
        request_ids: The requests of this stream.
        abort: Called with the ids still alive when the reader goes away.
    """

    def __init__(self, request_ids: Iterable[str], abort: Callable[[list[str]], None]) -> None:
        self.metrics: list[RequestMetrics] = []
        """Times and counts of each request, in order; updated until it ends."""
        self._alive = dict.fromkeys(request_ids)
        self._abort = abort
        self._pending: dict[str, EngineCoreOutput] = {}
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._on_output: Callable[[EngineCoreOutput], None] | None = None
        self._on_error: Callable[[Exception], None] | None = None

    def redirect(self, on_output: Callable[[EngineCoreOutput], None], on_error: Callable[[Exception], None]) -> None:
        """Hand over each output, and the error that ends the stream, when they come; nobody reads then."""
        self._on_output, self._on_error = on_output, on_error

    def push(self, output: EngineCoreOutput) -> None:
        """Add an output of one of the requests (called by the client)."""
        if self._on_output is not None:
            self._on_output(output)
            if output.finish_reason is not None:
                self._alive.pop(output.request_id, None)
            return
        pending = self._pending.get(output.request_id)
        self._pending[output.request_id] = output if pending is None else merge_outputs(pending, output)
        if output.finish_reason is not None:
            self._alive.pop(output.request_id, None)
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream with an error, behind the outputs that came before."""
        if self._on_error is not None:
            self._on_error(error)
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
