"""Control calls of a client: numbered, sent to the core, answered or timed out. Knows no transport."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from quire_engine.messages import UtilityCall, UtilityReply
from quire_interfaces import EngineDeadError

__all__ = ["ControlCalls"]


class ControlCalls:
    """The calls that wait for their answers.

    Args:
        send: Takes a message to the core.
        timeout_s: Every call must be answered within this time.
    """

    def __init__(self, send: Callable[[UtilityCall], None], timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._ids = itertools.count(1)
        self._futures: dict[int, asyncio.Future[Any]] = {}

    async def call(self, method: str, /, **arguments: Any) -> Any:
        """The core's answer to one of `core_loop.UTILITIES`.

        Raises:
            EngineDeadError: there is no answer in time.
            RequestError: the core refused.
        """
        return await self.call_within(self._timeout_s, method, **arguments)

    async def call_within(self, timeout_s: float, method: str, /, **arguments: Any) -> Any:
        """As `call`, with a time of its own."""
        message = self._message(method, arguments)
        future = self._expect(message)
        try:
            self._send(message)
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            name = "call_timeout_s" if timeout_s == self._timeout_s else "startup_timeout_s"
            raise EngineDeadError(
                f"the engine did not answer {method!r} within {name}={timeout_s:g}: "
                "a step takes very long, or the engine hangs"
            ) from None
        finally:
            self._futures.pop(message.call_id, None)

    def send(self, method: str, **arguments: Any) -> None:
        """Call without waiting; the answer is not looked at."""
        self._send(self._message(method, arguments))

    def send_then(self, on_reply: Callable[[Any], None], method: str, **arguments: Any) -> None:
        """Call without waiting; `on_reply` gets the result, if there is one."""
        message = self._message(method, arguments)

        def done(future: asyncio.Future[Any]) -> None:
            self._futures.pop(message.call_id, None)
            if not future.cancelled() and future.exception() is None:
                on_reply(future.result())

        self._expect(message).add_done_callback(done)
        self._send(message)

    def on_reply(self, message: UtilityReply) -> None:
        """An answer has come."""
        future = self._futures.get(message.call_id)
        if future is None or future.done():
            return
        if message.error is not None:
            future.set_exception(message.to_error())
        else:
            future.set_result(message.result)

    def fail_all(self, make_error: Callable[[], EngineDeadError]) -> None:
        """Every call that waits ends with an error of its own."""
        for future in self._futures.values():
            if not future.done():
                future.set_exception(make_error())
                future.exception()  # read once: nobody may be waiting any more

    def _message(self, method: str, arguments: dict[str, Any]) -> UtilityCall:
        return UtilityCall(call_id=next(self._ids), method=method, arguments=arguments)

    def _expect(self, message: UtilityCall) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._futures[message.call_id] = future
        return future
