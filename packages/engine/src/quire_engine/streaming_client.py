"""`StreamingClient`: all of an `EngineClient` that does not depend on where the core runs.

`InprocClient` and `ProcessClient` add the transport. Knows asyncio and the messages; knows no text and no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import reprlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from quire_engine.client import PAUSE_MODES, PauseMode
from quire_engine.compiled_grammars import CompiledGrammars
from quire_engine.config import EngineConfig
from quire_engine.control_calls import ControlCalls
from quire_engine.counters import add_counters
from quire_engine.listener import EngineListener, NullListener
from quire_engine.messages import (
    AbortRequests,
    AddRequest,
    ClientMessage,
    CoreMessage,
    EngineFailed,
    EngineInfo,
    EngineProgress,
    EngineReady,
    EngineStopped,
    Outputs,
    RequestRejected,
    Shutdown,
    UtilityReply,
)
from quire_engine.request_book import InFlight, RequestBook
from quire_engine.streams import OutputStream
from quire_engine.watch_client import read_record, read_report
from quire_interfaces import (
    AdapterInfo,
    EngineCoreOutput,
    EngineDeadError,
    FinishReason,
    OverloadedError,
    PauseState,
    RequestError,
    SchedulerStats,
)
from quire_interfaces.engine_watch import RequestRecord, WatchCursor, WatchReport

__all__ = ["EngineOwner", "StreamingClient", "failure_text", "first_line"]

_logger = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
"""Beyond the drain's time, how long a shutdown waits for the core before it ends it."""

PAUSE_POLL_S = 0.02
"""How often a pause that waits for requests looks whether they have ended."""

WATCH_INTERVAL_S = 1.0
"""How often a client looks whether the engine still steps; more often where `stall_timeout_s` is short."""

MAX_QUICK_TRIALS = 2
"""Deaths by SIGKILL after which a request waits before it is tried again, so that a process killed meanwhile may
show that it is not the cause."""
SUSPECT_DELAY_S = 1.0
"""How long it waits."""

RETRY_ADOPTED_S = 0.1
"""When an engine's queue has no room for a request of another engine, how long until the next try."""


class EngineOwner(Protocol):
    """Who has several engines, and moves requests from one to another (`EnginePool`)."""

    compiled_grammars: CompiledGrammars
    """Constraints that any of them has compiled."""

    def abort(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> None:
        """End requests, whichever engine has them."""

    def on_engine_failed(self, client: StreamingClient) -> None:
        """The engine is gone, for now or for good. Requests that are not taken from it now (`take_requests`) wait for
        its return, or end with its error."""

    def on_engine_ready(self, client: StreamingClient) -> None:
        """The engine takes requests, for the first time or again."""


# Many attributes: requests, calls, suspects and the watch over one engine, which all end with it.
class StreamingClient:
    """An `EngineClient` without its transport: subclasses send messages and hand in what comes back.

    Args:
        config: The engine's settings.
        listener: Hears of steps and requests.
        owner: Who moves requests between this engine and others; None where it is the only one.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        listener: EngineListener | None = None,
        owner: EngineOwner | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.listener: EngineListener = listener or NullListener()
        self.info: EngineInfo | None = None
        self.on_progress: Callable[[str, float], None] | None = None
        """Called with (stage, fraction) while the engine starts."""
        self.adapters: dict[str, str] = {}
        """Name -> place of each adapter that requests may choose."""
        self.last_stats = SchedulerStats()
        self.num_restarts = 0
        """Number of engine processes that ended and were started again."""
        self._rest: tuple[str, dict[str, Any]] | None = None
        """The call that paused the engine or put it to sleep: one that is started again rests as well."""
        self._live_values: dict[str, Any] = {}
        """Settings that were changed since the start, also of an engine that is started again."""
        self._max_requests = self.config.max_requests_in_flight
        self._former_stats = SchedulerStats()
        """Of engine processes that died; their counters are part of all statistics."""
        self._owner = owner
        self._compiled_grammars = CompiledGrammars() if owner is None else owner.compiled_grammars
        keeps_tokens = owner is not None or self.config.max_restarts > 0
        self._book: RequestBook[OutputStream] = RequestBook(self.listener, keeps_tokens=keeps_tokens)
        self._calls = ControlCalls(self._send, self.config.call_timeout_s)
        self._suspects: list[str] = []
        """Requests that may be what kills engine processes, which go on one after the other."""
        self._tried_suspect: str | None = None
        self._suspects_wait_until_s = 0.0
        self._dead: EngineDeadError | None = None
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._stopped: asyncio.Future[None] | None = None
        self._is_stopping = False
        self._progress_s = 0.0
        """When the engine last stepped, or began to have something to do."""
        self._is_watched = False
        self._has_reported_stall = False

    # Transport, given by subclasses.

    def _send(self, message: ClientMessage) -> None:
        raise NotImplementedError(f"{type(self).__name__} must say how messages reach the core")

    async def _close_transport(self, timeout_s: float) -> None:
        raise NotImplementedError(f"{type(self).__name__} must say how its transport ends")

    # Requests.

    def open(self, requests: Sequence[AddRequest], *, n: int = 1) -> OutputStream:
        raise NotImplementedError(f"{type(self).__name__} must say how requests reach the core")

    def _new_stream(self, requests: Sequence[AddRequest]) -> OutputStream:
        """The stream of requests that may be sent now. Raises as `EngineClient.open` does."""
        self.check_health()
        if self._owner is None and any(request.options.data_parallel_rank for request in requests):
            raise RequestError("there is one engine only, of data_parallel_rank 0", param="data_parallel_rank")
        self._check_room(requests)
        if not self._book:
            self._progress_s = time.monotonic()
        abort = self.abort if self._owner is None else self._owner.abort
        return OutputStream([each.request_id for each in requests], abort)

    def _check_room(self, requests: Sequence[AddRequest]) -> None:
        """Raises OverloadedError for more requests than may be in flight, RequestError for an id that is in use."""
        bound = self._max_requests
        if len(self._book) + len(requests) > bound:
            raise OverloadedError(
                f"{len(self._book)} requests are in flight and max_requests_in_flight is {bound}: "
                "try again later, or raise the bound",
                retry_after_s=self._book.retry_after_s(),
            )
        for request in requests:
            if request.request_id in self._book:
                raise RequestError(
                    f"request id {request.request_id!r} is in use; give each request its own", param="request_id"
                )

    def _note_sent(self, request: AddRequest, stream: OutputStream, n: int) -> None:
        """A request of a stream is on its way."""
        entry = self._book.add(request, stream, n=n, num_prompt_tokens=len(request.prompt) // 4)
        stream.metrics.append(entry.metrics)

    def abort(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> None:
        aborted_ids: list[str] = []
        for request_id in request_ids:
            entry = self._book.finish(request_id, reason)
            if entry is not None:
                aborted_ids.append(request_id)
                entry.reader.push(EngineCoreOutput(request_id, [], finish_reason=reason))
        if aborted_ids and self._dead is None:
            self._send(AbortRequests(request_ids=aborted_ids))
            if self._suspects:
                self._try_suspect()

    def abort_all(self) -> None:
        self.abort([entry.request.request_id for entry in self._book])

    def num_requests(self) -> int:
        return len(self._book)

    @property
    def num_waiting_tokens(self) -> int:
        """Number of prompt tokens of the requests in flight that have no token yet."""
        return self._book.num_waiting_tokens

    def retry_after_s(self) -> float:
        """Seconds until a place may be free."""
        return self._book.retry_after_s()

    def has_request(self, request_id: str) -> bool:
        """Whether this request is in flight here."""
        return request_id in self._book

    def take_requests(self) -> list[InFlight[OutputStream]]:
        """Forget all requests in flight, so that they go on in another engine (`adopt_requests`); one that lives drops
        them before its next step."""
        entries = list(self._book)
        self._forget_suspects()
        for entry in entries:
            self._book.take(entry.request.request_id)
        if entries and self._dead is None:
            self._send(AbortRequests(request_ids=[entry.request.request_id for entry in entries]))
        return entries

    def adopt_requests(self, entries: Iterable[InFlight[OutputStream]]) -> None:
        """Go on with requests of another engine: in their preempted form, behind the tokens that they have."""
        if not self._book:
            self._progress_s = time.monotonic()
        for entry in entries:
            entry.is_adopted = True
            self._book.adopt(entry)
            self._resume(entry)

    def _resume(self, entry: InFlight[OutputStream]) -> None:
        """Go on with a request behind the tokens that it has; with one that may be what kills engine processes, when no
        other one of that kind is tried."""
        if entry.is_suspect:
            if not self._suspects:
                self._delay_suspects()
            self._suspects.append(entry.request.request_id)
            self._try_suspect()
        else:
            self._send_resumed(entry.request.request_id)

    def _forget_suspects(self) -> None:
        """Nothing waits for its turn, and none is tried: the process, or this client, has them no more."""
        self._suspects.clear()
        self._tried_suspect = None

    def _is_trial(self) -> bool:
        """Whether a suspect was sent that has not got a token yet."""
        tried = self._book.get(self._tried_suspect or "")
        return tried is not None and tried.is_suspect

    def _delay_suspects(self) -> None:
        self._suspects_wait_until_s = time.monotonic() + SUSPECT_DELAY_S
        asyncio.get_running_loop().call_later(SUSPECT_DELAY_S + 0.01, self._try_suspect)

    def _try_suspect(self) -> None:
        """Send the next suspect, that of the fewest deaths, unless one is there that has not got a token yet."""
        if self._is_trial():
            return
        if self._tried_suspect is not None:
            self._tried_suspect = None
            self._delay_suspects()
        known = (self._book.get(request_id) for request_id in self._suspects)
        entries = [entry for entry in known if entry is not None]
        self._suspects = [entry.request.request_id for entry in entries]
        entry = min(entries, key=lambda entry: entry.num_deaths, default=None)
        if entry is None:
            return
        waits = entry.was_killed and entry.num_deaths > MAX_QUICK_TRIALS
        if not waits or time.monotonic() >= self._suspects_wait_until_s:
            self._tried_suspect = entry.request.request_id
            self._suspects.remove(self._tried_suspect)
            self._send_resumed(self._tried_suspect)

    def _send_resumed(self, request_id: str) -> None:
        """Send a request with the tokens that it has, unless it has ended."""
        entry = self._book.get(request_id)
        if entry is not None:
            self._send(self._compiled_grammars.marked(entry.request).resumed(list(entry.token_ids)))

    # What comes back.

    def _on_message(self, message: CoreMessage) -> None:
        if isinstance(message, Outputs):
            self._on_outputs(message)
        elif isinstance(message, UtilityReply):
            self._calls.on_reply(message)
        elif isinstance(message, EngineProgress):
            if self.on_progress is not None:
                self.on_progress(message.stage, message.fraction)
        elif isinstance(message, EngineReady):
            if self.info is None:
                self.adapters = dict(message.info.adapters)
            self.info = message.info
            self._progress_s = time.monotonic()
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(message.info)
            self._on_ready()
        elif isinstance(message, EngineFailed):
            self._on_failed(message)
        else:
            self._on_stopped(message)

    def _on_outputs(self, message: Outputs) -> None:
        now = time.monotonic()
        if message.step_tokens or message.outputs:
            self._progress_s = now
        self._book.start(message.started, message.started_time_s)
        for output in message.outputs:
            entry = self._book.record(output, now)
            if entry is not None:
                if output.new_token_ids and entry.metrics.num_generation_tokens == len(output.new_token_ids):
                    self._compiled_grammars.note(entry.request)
                entry.reader.push(output)
        for rejected in message.rejected:
            self._on_rejected(rejected)
        if self._suspects:
            self._try_suspect()
        stats = message.stats and add_counters(message.stats, self._former_stats)
        self.last_stats = stats or self.last_stats
        for num_tokens in message.step_tokens:
            self.listener.on_step(num_tokens, None)
        if stats is not None:
            self.listener.on_step(0, stats)

    def _on_ready(self) -> None:
        """The engine takes requests, for the first time or again."""
        if self._owner is not None:
            self._owner.on_engine_ready(self)

    def _on_rejected(self, rejected: RequestRejected) -> None:
        entry = self._book.get(rejected.request_id)
        if entry is not None and entry.is_adopted and rejected.kind == "overloaded":
            loop = asyncio.get_running_loop()  # its caller was told long ago that it runs
            loop.call_later(RETRY_ADOPTED_S, self._send_resumed, rejected.request_id)
            return
        entry = self._book.reject(rejected.request_id)
        if entry is not None:
            entry.reader.fail(rejected.to_error())

    # Life and death.

    async def ready(self) -> EngineInfo:
        self.check_health()
        self._begin_watch()
        if self.info is not None:
            return self.info
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), self.config.startup_timeout_s)
        except TimeoutError:
            self._die(
                EngineDeadError(
                    f"the engine was not ready within startup_timeout_s={self.config.startup_timeout_s:g}: "
                    "look at what it printed, or give it more time"
                )
            )
            await self._close_transport(0.0)
            raise self._dead_error() from None

    def check_health(self) -> None:
        if self._dead is not None:
            raise self._dead_error()

    @property
    def is_loading(self) -> bool:
        return self.info is None and self._dead is None

    @property
    def is_resting(self) -> bool:
        return self._rest is not None

    @property
    def stalled_s(self) -> float:
        if not self._book or self.is_loading or self.is_resting or self._dead is not None:
            return 0.0
        return time.monotonic() - self._progress_s

    @property
    def is_stalled(self) -> bool:
        return self.stalled_s >= self.config.stall_timeout_s

    def _begin_watch(self) -> None:
        if not self._is_watched:
            self._is_watched = True
            self._watch(asyncio.get_running_loop())

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tell of a stall when it begins and when it ends, until the engine is gone."""
        if self._dead is not None:
            return
        if self.is_stalled != self._has_reported_stall:
            self._has_reported_stall = not self._has_reported_stall
            if self._has_reported_stall:
                self.listener.on_stall()
                _logger.error(
                    "the engine is stalled: it has taken no step for %.1f s (stall_timeout_s=%g) and has %d requests",
                    self.stalled_s,
                    self.config.stall_timeout_s,
                    len(self._book),
                )
            else:
                _logger.warning("the engine is not stalled any more")
        limits_s = (self.config.stall_timeout_s, self.config.step_timeout_s)
        loop.call_later(min(WATCH_INTERVAL_S, *(limit_s / 4 for limit_s in limits_s)), self._watch, loop)

    @property
    def is_dead(self) -> bool:
        """Whether the engine is gone (failed, or shut down)."""
        return self._dead is not None

    async def shutdown(self, drain_s: float | None = None) -> None:
        drain_s = self.config.shutdown_timeout_s if drain_s is None else drain_s
        is_up = self.info is not None and self._dead is None
        if is_up:
            if self._stopped is None:
                self._is_stopping = True
                self._stopped = asyncio.get_running_loop().create_future()
            self._send(Shutdown(drain_s=drain_s))  # a second one may shorten the time
            # The core needs a little longer than the drain: a step may be running when the time is over.
            await asyncio.wait([self._stopped], timeout=drain_s + STOP_GRACE_S)
        self._die(EngineDeadError("the engine was shut down"))
        await self._close_transport(STOP_GRACE_S if is_up else 0.0)

    def _on_failed(self, message: EngineFailed) -> None:
        self._die(EngineDeadError(failure_text(message), is_wrong_setting=message.is_wrong_setting))

    def _on_stopped(self, message: EngineStopped) -> None:
        for entry in self._book:  # the drain's time was over before they finished
            request_id = entry.request.request_id
            self._book.finish(request_id, FinishReason.ABORT)
            entry.reader.push(EngineCoreOutput(request_id, [], finish_reason=FinishReason.ABORT))
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(None)

    def _die(self, error: EngineDeadError) -> None:
        """Every stream and call ends with the error; the first one wins."""
        if self._dead is not None:
            return
        self._dead = error
        if self.info is not None and not self._is_stopping:
            _logger.error("the engine is gone for good: %s", first_line(error))
        if self._owner is not None and not self._is_stopping:
            self._owner.on_engine_failed(self)
        self._no_engine_stats(0)
        for entry in self._book:
            self._book.finish(entry.request.request_id, FinishReason.ERROR)
            entry.reader.fail(self._dead_error())
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(self._dead_error())
            self._ready.exception()  # read once: nobody may be waiting any more
        self._calls.fail_all(self._dead_error)

    def _no_engine_stats(self, num_waiting: int) -> None:
        """The engine is gone, for now or for good: nothing runs there, and what was counted stays counted."""
        self._former_stats = self.last_stats
        gauges = SchedulerStats(num_waiting=num_waiting, num_waiting_deferred=num_waiting)
        self.last_stats = add_counters(gauges, self._former_stats)
        self.listener.on_step(0, self.last_stats)

    def _dead_error(self) -> EngineDeadError:
        # A fresh instance each time: an exception object collects the tracebacks of all who raise it.
        assert self._dead is not None
        return EngineDeadError(str(self._dead), is_wrong_setting=self._dead.is_wrong_setting)

    # Control calls.

    async def stats(self) -> SchedulerStats:
        stats = msgspec.convert(await self._call("stats"), SchedulerStats)
        self.last_stats = add_counters(stats, self._former_stats)
        self.listener.on_step(0, self.last_stats)
        return self.last_stats

    async def ping(self) -> float:
        start = time.monotonic()
        await self._call("ping")
        return time.monotonic() - start

    async def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = False) -> None:
        if mode not in PAUSE_MODES:
            raise RequestError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {reprlib.repr(mode)}", param="mode")
        if mode == "wait":
            await self._set_pause_state(PauseState.NEW_HELD)
            while await self._has_running():
                await asyncio.sleep(PAUSE_POLL_S)
        else:
            await self._set_pause_state(PauseState.ALL_HELD)
            if mode == "abort":
                self.abort_all()
        if clear_cache:
            await self.reset_prefix_cache(preempt_running=True)

    async def _has_running(self) -> bool:
        """Whether requests still run though new ones are held; not when somebody has resumed meanwhile."""
        stats = await self.stats()
        return bool(stats.num_running + stats.num_preempted) and await self.is_paused()

    async def _set_pause_state(self, state: PauseState) -> None:
        await self._call("pause", state=int(state))
        self._rest = None if state == PauseState.RUNNING else ("pause", {"state": int(state)})
        self._progress_s = time.monotonic()

    async def resume(self) -> None:
        await self._set_pause_state(PauseState.RUNNING)

    async def is_paused(self) -> bool:
        return bool(await self._call("is_paused"))

    async def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        return bool(await self._call("reset_prefix_cache", preempt_running=preempt_running))

    async def reset_encoder_cache(self) -> bool:
        return bool(await self._call("reset_encoder_cache"))

    async def sleep(self, level: int = 1) -> int:
        num_bytes = int(await self._call("sleep", level=level))
        self._rest = ("sleep", {"level": level})
        self.listener.on_sleep(level)
        return num_bytes

    async def wake_up(self, tags: Sequence[str] = ()) -> int | None:
        self.check_health()  # weights may have to be loaded, which may take as long as at the start
        level: int | None = await self._calls.call_within(self.config.startup_timeout_s, "wake_up", tags=list(tags))
        self.listener.on_sleep(level)
        if self._rest is not None and self._rest[0] == "sleep":
            self._rest = None if level is None else ("sleep", {"level": level})
        self._progress_s = time.monotonic()
        return level

    async def sleep_level(self) -> int | None:
        level: int | None = await self._call("sleep_level")
        return level

    async def check_integrity(self) -> str | None:
        result = await self._call("check_integrity")
        return None if result is None else str(result)

    async def engine_ranks(self) -> list[int]:
        return [0]

    async def watch(self, rank: int, watcher: str, cursor: WatchCursor) -> WatchReport:
        data: bytes = await self._call("watch", watcher=watcher, cursor=list(cursor))
        report = read_report(data, self.last_stats, self.num_restarts)
        self.listener.on_watched(report.requests)
        return report

    async def leave_watch(self, watcher: str) -> None:
        await self._call("leave_watch", watcher=watcher)

    async def explain_request(self, request_id: str) -> RequestRecord | None:
        return read_record(await self._call("explain_request", request_id=request_id))

    async def collective_rpc(
        self, method: str, arguments: Sequence[Any] = (), named: Mapping[str, Any] = {}
    ) -> list[list[Any]]:
        return [await self._call("collective_rpc", method=method, arguments=list(arguments), named=dict(named))]

    async def reconfigure(self, values: Mapping[str, Any]) -> None:
        await self._call("reconfigure", values=dict(values))
        self._live_values = dict(values)
        self.bound_requests(values.get("max_requests_in_flight"))

    def bound_requests(self, bound: int | None) -> None:
        """Take another bound of requests in flight; None for that of the start."""
        self._max_requests = self.config.max_requests_in_flight if bound is None else bound

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> AdapterInfo:
        info = AdapterInfo(**await self._call("load_adapter", name=name, path=path, replace=replace))
        self.adapters[name] = path
        return info

    async def unload_adapter(self, name: str) -> None:
        await self._call("unload_adapter", name=name)
        self.adapters.pop(name, None)

    async def _call(self, method: str, /, **arguments: Any) -> Any:
        self.check_health()
        return await self._calls.call(method, **arguments)


def first_line(cause: object) -> str:
    """The first line of a cause; others repeat what the engine printed, which was logged."""
    return str(cause).partition("\n")[0]


def failure_text(message: EngineFailed) -> str:
    """Cause and remedy, as the core gave them."""
    return message.cause if not message.remedy else f"{message.cause}\n{message.remedy}"
