"""The loop around an `EngineCore`: messages in, steps, messages out, until it is told to stop.

Knows the messages and their meaning. Knows no sockets: where messages come from and go to is handed in, so the same
loop runs in a process of its own and in a thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from quire_engine.core import EngineCore, StepResult
from quire_engine.messages import (
    AbortRequests,
    AddRequest,
    ClientMessage,
    CoreMessage,
    EngineFailed,
    EngineStopped,
    Outputs,
    RequestRejected,
    UtilityCall,
    UtilityReply,
    merge_outputs,
)
from quire_interfaces import (
    AdapterInfo,
    AdapterStore,
    EngineCoreOutput,
    EngineDeadError,
    OverloadedError,
    PauseState,
    QuireError,
    RequestError,
)
from quire_interfaces.engine_watch import WatchCursor

__all__ = ["UTILITIES", "CoreLoop", "Inbox"]

_logger = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.1
IDLE_WAIT_S = 1.0
PREPARING_WAIT_S = 0.002
"""How long to wait for messages when a request waits for what is prepared beside the loop."""
HELD_WAIT_S = 0.02
"""How long to wait for messages when requests are there but none can run (a rule may admit one any moment)."""
MESSAGES_S = 0.005
"""How long messages are handled between two steps while requests run, who wait meanwhile. One more begins before."""


class Inbox(Protocol):
    """Where a core loop gets its messages from."""

    def receive(self, timeout_s: float) -> Iterable[ClientMessage]:
        """The messages that are there; waits up to `timeout_s` for the first one. Empty after the timeout. Whoever
        iterates may take a pause of some steps, after which messages may have come."""


class CoreLoop:
    """Serves one core until a `Shutdown` message has been carried out or the core fails.

    Args:
        core: Owned by the loop; closed at the end.
        inbox: Messages from the client.
        send: Takes a message to the client; may block while the client is behind (then the core is, too).
    """

    def __init__(self, core: EngineCore, inbox: Inbox, send: Callable[[CoreMessage], None]) -> None:
        self._core = core
        self._inbox = inbox
        self._messages: Iterator[ClientMessage] | None = None
        """Not handled yet."""
        self._send = send
        self._stream_interval = core.config.stream_interval
        self._held: dict[str, EngineCoreOutput] = {}
        self._has_streamed: set[str] = set()
        self._step_tokens: list[int] = []
        """Of steps that no message has reported yet."""
        self._pause_state = PauseState.RUNNING
        self._drain_deadline_s: float | None = None
        self._next_stats_s = 0.0
        self._stats_stale = False
        self._idle_step = False
        self._pending_calls: list[tuple[int, Future[Any]]] = []
        """Control calls whose answer is worked on beside the loop."""

    def run(self) -> None:
        """Serve. Returns after a `Shutdown`; every other end is an exception.

        Raises:
            EngineDeadError: the core cannot go on; an `EngineFailed` message was sent before.
        """
        try:
            while not self._is_drained():
                self._handle_messages()
                self._answer_calls()
                for request_id, error in self._core.take_rejected():
                    self._stats_stale = True
                    self._reject(request_id, error)
                if self._core.has_work():
                    result = self._core.step()
                    self._idle_step = not result.did_something
                    self._publish(result)
                elif self._stats_stale:
                    self._publish(StepResult())
            self._stop()
        except Exception as error:
            cause = str(error) if isinstance(error, EngineDeadError) else f"{type(error).__name__}: {error}"
            remedy = "Start the engine again; report the cause if it stays."
            self._send(EngineFailed(cause=cause, remedy=remedy, signal=getattr(error, "signal", None)))
            raise

    def _wait_s(self) -> float:
        if self._core.has_work() and not self._idle_step:
            return 0.0
        self._idle_step = False
        if self._stats_stale:
            return 0.0
        if self._core.is_preparing or self._pending_calls:
            return PREPARING_WAIT_S
        if self._core.has_requests():
            return HELD_WAIT_S
        return IDLE_WAIT_S

    def _is_drained(self) -> bool:
        if self._drain_deadline_s is None:
            return False
        return not self._core.has_requests() or time.monotonic() >= self._drain_deadline_s

    def _stop(self) -> None:
        self._publish(self._core.collect_all())
        num_aborted = len(self._core.abort_all())
        self._core.flush()
        self._core.close()
        self._send(EngineStopped(num_aborted=num_aborted))

    def _handle_messages(self) -> None:
        """Handle what came. Where it takes long, as a thousand new requests do, steps come between."""
        if self._messages is None:
            self._messages = iter(self._inbox.receive(self._wait_s()))
        deadline_s = 0.0
        for message in self._messages:
            deadline_s = deadline_s or time.monotonic() + MESSAGES_S
            self._handle(message)
            if time.monotonic() >= deadline_s and self._core.has_work():
                return
        self._messages = None

    def _handle(self, message: ClientMessage) -> None:
        if isinstance(message, AddRequest):
            self._add(message)
        elif isinstance(message, AbortRequests):
            self._core.abort_requests(message.request_ids)
            for request_id in message.request_ids:
                self._held.pop(request_id, None)
                self._has_streamed.discard(request_id)
            self._stats_stale = True
        elif isinstance(message, UtilityCall):
            self._call(message)
        else:
            self._drain_deadline_s = time.monotonic() + message.drain_s
            if self._pause_state != PauseState.RUNNING:  # held requests would never finish
                self._pause(PauseState.RUNNING)

    def _add(self, message: AddRequest) -> None:
        try:
            if self._drain_deadline_s is not None:
                raise OverloadedError("the engine is shutting down and takes no new requests", retry_after_s=5.0)
            self._core.add_request(message.to_request())
        except QuireError as error:
            self._reject(message.request_id, error)
        except (TypeError, ValueError) as error:  # a malformed request is its own error, never the engine's
            self._reject(message.request_id, RequestError(f"{type(error).__name__}: {error}"))

    def _reject(self, request_id: str, error: QuireError) -> None:
        self._send(Outputs(rejected=[RequestRejected.from_error(request_id, error)]))

    def _call(self, message: UtilityCall) -> None:
        utility = UTILITIES.get(message.method)
        try:
            if utility is None:
                raise RequestError(f"no utility {message.method!r}; there are {', '.join(sorted(UTILITIES))}")
            result = utility(self, **message.arguments)
        except Exception as error:  # the caller's problem, not the engine's
            self._send(UtilityReply.from_error(message.call_id, error))
            return
        if isinstance(result, Future):
            self._pending_calls.append((message.call_id, result))
        else:
            self._send(UtilityReply(call_id=message.call_id, result=result))

    def _answer_calls(self) -> None:
        for call in [call for call in self._pending_calls if call[1].done()]:
            self._pending_calls.remove(call)
            call_id, future = call
            error = future.exception()
            if error is not None:
                self._send(UtilityReply.from_error(call_id, error))
            else:
                self._send(UtilityReply(call_id=call_id, result=future.result()))

    def _publish(self, result: StepResult) -> None:
        outputs = result.outputs if self._stream_interval == 1 else self._group(result.outputs)
        now = time.monotonic()
        stats = None
        if self._stats_stale or now >= self._next_stats_s or not self._core.has_requests():
            stats = self._core.stats()
            self._next_stats_s = now + STATS_INTERVAL_S
            self._stats_stale = False
        self._step_tokens += result.step_tokens
        # A step that gives nobody anything waits for the next message: each one wakes the client's process.
        if outputs or result.started or stats is not None:
            step_tokens, self._step_tokens = self._step_tokens, []
            self._send(
                Outputs(
                    outputs=outputs,
                    started=result.started,
                    started_time_s=result.started_time_s,
                    step_tokens=step_tokens,
                    stats=stats,
                )
            )

    def _group(self, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """Hold tokens back until `stream_interval` of them are there; the first and the last go at once."""
        ready: list[EngineCoreOutput] = []
        for output in outputs:
            request_id = output.request_id
            earlier = self._held.pop(request_id, None)
            if earlier is not None:
                output = merge_outputs(earlier, output)
            finished = output.finish_reason is not None
            is_first = request_id not in self._has_streamed
            if finished or is_first or len(output.new_token_ids) >= self._stream_interval:
                ready.append(output)
                if finished:
                    self._has_streamed.discard(request_id)
                elif output.new_token_ids:
                    self._has_streamed.add(request_id)
            else:
                self._held[request_id] = output
        return ready

    # Utilities: what a UtilityCall may name.

    def _ping(self) -> float:
        return time.monotonic()

    def _stats(self) -> Any:
        return self._core.stats()

    def _pause(self, state: int = PauseState.ALL_HELD) -> None:
        if self._core.sleep_level is not None:
            raise RequestError("the engine sleeps: wake it first", code="sleeping")
        self._pause_state = PauseState(state)
        self._core.pause(self._pause_state)
        if self._pause_state == PauseState.ALL_HELD:
            self._publish(self._core.collect_all())

    def _sleep(self, level: int = 1) -> int:
        self._publish(self._core.collect_all())
        num_bytes = self._core.sleep(level)
        self._pause_state = PauseState.ALL_HELD
        return num_bytes

    def _wake_up(self, tags: Sequence[str] = ()) -> int | None:
        if self._core.sleep_level is not None and self._core.wake_up(tags) is None:
            self._pause_state = PauseState.RUNNING
        return self._core.sleep_level

    def _sleep_level(self) -> int | None:
        return self._core.sleep_level

    def _is_paused(self) -> bool:
        return self._pause_state != PauseState.RUNNING

    def _reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        self._publish(self._core.collect_all())
        return self._core.reset_prefix_cache(preempt_running=preempt_running)

    def _reset_encoder_cache(self) -> bool:
        return self._core.reset_encoder_cache()

    @property
    def _adapters(self) -> AdapterStore:
        if self._core.parts.adapters is None:
            raise RequestError("this engine serves no adapters; start it with --enable-lora", code="lora_disabled")
        return self._core.parts.adapters

    def _load_adapter(self, name: str, path: str, replace: bool = False) -> Future[AdapterInfo]:
        return self._adapters.load(name, path, replace=replace)

    def _unload_adapter(self, name: str) -> None:
        self._adapters.unload(name)

    def _restore_adapters(self, unloads: list[str], loads: dict[str, str]) -> dict[str, str]:
        """Offer other adapters than those of the start; requests wait. What cannot be read any more is left out: its
        name -> why."""
        failed: dict[str, str] = {}
        for name in unloads:
            self._adapters.unload(name)
        for name, path in loads.items():
            try:
                self._adapters.load(name, path).result()
            except QuireError as error:
                failed[name] = str(error)
                _logger.warning("the adapter %r is not served any more: %s", name, error)
        return failed

    def _fetch_watch(self, watcher: str, cursor: list[int]) -> bytes:
        """A `WatchReport`, encoded: what it is made of goes on changing."""
        return msgspec.msgpack.encode(self._core.watch().report(watcher, WatchCursor(*cursor)))

    def _leave_watch(self, watcher: str) -> None:
        self._core.leave_watch(watcher)

    def _explain_request(self, request_id: str) -> bytes:
        """A `RequestRecord` or None, encoded."""
        return msgspec.msgpack.encode(self._core.explain_request(request_id))

    def _collective_rpc(self, method: str, arguments: list[Any], named: dict[str, Any]) -> list[Any]:
        self._publish(self._core.collect_all())
        return self._core.collective_rpc(method, arguments, named)

    def _reconfigure(self, values: dict[str, Any]) -> None:
        self._core.reconfigure(values)

    def _check_integrity(self) -> str | None:
        """None when all is well, else what is wrong."""
        self._publish(self._core.collect_all())
        check = self._core.parts.check_integrity
        if check is None:
            return "this engine was assembled without an integrity check"
        try:
            check()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None


UTILITIES: dict[str, Callable[..., Any]] = {
    "check_integrity": CoreLoop._check_integrity,
    "collective_rpc": CoreLoop._collective_rpc,
    "explain_request": CoreLoop._explain_request,
    "is_paused": CoreLoop._is_paused,
    "leave_watch": CoreLoop._leave_watch,
    "load_adapter": CoreLoop._load_adapter,
    "pause": CoreLoop._pause,
    "ping": CoreLoop._ping,
    "reconfigure": CoreLoop._reconfigure,
    "reset_encoder_cache": CoreLoop._reset_encoder_cache,
    "reset_prefix_cache": CoreLoop._reset_prefix_cache,
    "restore_adapters": CoreLoop._restore_adapters,
    "sleep": CoreLoop._sleep,
    "sleep_level": CoreLoop._sleep_level,
    "stats": CoreLoop._stats,
    "unload_adapter": CoreLoop._unload_adapter,
    "wake_up": CoreLoop._wake_up,
    "watch": CoreLoop._fetch_watch,
}
"""Control calls by name."""
