"""The client's side of an engine core: requests in, streams of outputs back, control calls.

`StreamingClient` is everything that does not depend on where the core runs; `InprocClient` and `ProcessClient` add the
transport. Knows asyncio and the messages; knows no text, no tokenizer and no HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from quire_engine.config import EngineConfig
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
    Shutdown,
    UtilityCall,
    UtilityReply,
    pack_token_ids,
)
from quire_engine.streams import InFlight, OutputStream, RequestMetrics
from quire_interfaces import (
    EngineCoreOutput,
    EngineDeadError,
    FinishReason,
    OverloadedError,
    PauseState,
    RequestError,
    SamplingParams,
    SchedulerStats,
)

__all__ = ["EngineClient", "StreamingClient", "failure_text", "first_line"]

_logger = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
"""Beyond the drain's time, how long a shutdown waits for the core before it ends it."""


WATCH_INTERVAL_S = 1.0
"""How often a client looks whether the engine still steps; more often where `stall_timeout_s` is short."""


class EngineClient(Protocol):
    """What a front end may ask of an engine, wherever the engine runs. All calls from one event loop."""

    async def ready(self) -> EngineInfo:
        """Wait until the engine takes requests.

        Raises:
            EngineDeadError: it could not start; the message says its own cause and remedy.
        """

    def open(self, requests: Sequence[AddRequest], *, n: int = 1) -> OutputStream:
        """Send requests that share one stream (the n completions of a prompt). Ids must never have been used before.

        Raises:
            OverloadedError: too many requests are in flight.
            RequestError: an id is in use, or a request holds something that cannot be sent.
            EngineDeadError: there is no engine.
        """

    def abort(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> None:
        """End requests before the engine's next step; their streams end with `reason`. Unknown ids are ignored."""

    async def stats(self) -> SchedulerStats:
        """Counters and gauges of this moment."""

    async def pause(self, state: PauseState = PauseState.ALL_HELD) -> None:
        """Hold new requests, or all."""

    async def resume(self) -> None:
        """Undo `pause`."""

    async def is_paused(self) -> bool: ...

    async def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget all cached blocks; whether it worked (it does not while blocks are in use)."""

    async def check_integrity(self) -> str | None:
        """None when the engine's bookkeeping is consistent, else what is wrong."""

    def check_health(self) -> None:
        """Raises:
        EngineDeadError: the engine is gone.
        """

    async def shutdown(self, drain_s: float | None = None) -> None:
        """Stop the engine: requests in flight get `drain_s` seconds (None: as configured) to finish. Idempotent."""


class StreamingClient:
    """An `EngineClient` without its transport: subclasses send messages and hand in what comes back."""

    def __init__(self, config: EngineConfig | None = None, listener: EngineListener | None = None) -> None:
        self.config = config or EngineConfig()
        self.listener: EngineListener = listener or NullListener()
        self.info: EngineInfo | None = None
        self.on_progress: Callable[[str, float], None] | None = None
        """Called with (stage, fraction) while the engine starts."""
        self.adapters: dict[str, str] = {}
        """Name -> place of each adapter that requests may choose."""
        self.last_stats = SchedulerStats()
        self._rest: tuple[str, dict[str, Any]] | None = None
        """The call that paused the engine or put it to sleep: one that is started again rests as well."""
        self._former_stats = SchedulerStats()
        """Of engine processes that died; their counters are part of all statistics."""
        self._requests: dict[str, InFlight] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count(1)
        self._dead: EngineDeadError | None = None
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._stopped: asyncio.Future[None] | None = None
        self._is_stopping = False
        self._finish_times_s: list[float] = []
        self._progress_s = 0.0
        """When the engine last stepped, or began to have something to do."""
        self._is_watched = False
        self._is_told_stalled = False

    # Transport, given by subclasses.

    def _send(self, message: ClientMessage) -> None:
        raise NotImplementedError(f"{type(self).__name__} must say how messages reach the core")

    async def _close_transport(self, timeout_s: float) -> None:
        raise NotImplementedError(f"{type(self).__name__} must say how its transport ends")

    # Requests.

    def open(self, requests: Sequence[AddRequest], *, n: int = 1) -> OutputStream:
        self.check_health()
        self._check_room(requests)
        if not self._requests:
            self._progress_s = time.monotonic()
        stream = OutputStream([each.request_id for each in requests], self._reader_left)
        sent: list[str] = []
        try:
            for request in requests:
                self._send(request)
                sent.append(request.request_id)
                metrics = self._new_metrics(request, n)
                self._requests[request.request_id] = InFlight(request, stream, metrics, [])
                self.listener.on_added(metrics)
        except Exception as error:
            self.abort(sent)
            if isinstance(error, (TypeError, msgspec.MsgspecError)):
                raise RequestError(f"the request cannot be sent to the engine: {error}") from None
            raise
        return stream

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        seed: int,
        max_tokens: int,
        stop_token_ids: frozenset[int] = frozenset(),
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> AsyncIterator[EngineCoreOutput]:
        """One request from start to end; leaving the iteration early aborts it. Raises like `open`."""
        request = AddRequest(
            request_id=request_id,
            prompt=pack_token_ids(prompt_token_ids),
            sampling_params=sampling_params,
            seed=seed,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
            arrival_time_s=time.monotonic(),
        )
        stream = self.open([request])
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    def abort(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> None:
        gone: list[str] = []
        for request_id in request_ids:
            entry = self._requests.pop(request_id, None)
            if entry is not None:
                gone.append(request_id)
                self._finished(entry, reason)
                entry.stream.push(EngineCoreOutput(request_id, [], finish_reason=reason))
        if gone and self._dead is None:
            self._send(AbortRequests(request_ids=gone))

    def num_requests(self) -> int:
        """Requests in flight, by this client's count."""
        return len(self._requests)

    def _reader_left(self, request_ids: list[str]) -> None:
        self.abort(request_ids)

    def _check_room(self, requests: Sequence[AddRequest]) -> None:
        bound = self.config.max_requests_in_flight
        if len(self._requests) + len(requests) > bound:
            raise OverloadedError(
                f"{len(self._requests)} requests are in flight and max_requests_in_flight is {bound}: "
                "try again later, or raise the bound",
                retry_after_s=self.retry_after_s(),
            )
        for request in requests:
            if request.request_id in self._requests:
                raise RequestError(
                    f"request id {request.request_id!r} is in use; give each request its own", param="request_id"
                )

    def retry_after_s(self) -> float:
        """When a place may be free: the mean time between the last finished requests, at least a tenth of a second."""
        times = self._finish_times_s
        if len(times) < 2:
            return 1.0
        return min(60.0, max(0.1, (times[-1] - times[0]) / (len(times) - 1)))

    @staticmethod
    def _new_metrics(request: AddRequest, n: int) -> RequestMetrics:
        return RequestMetrics(
            arrival_time_s=request.arrival_time_s or time.monotonic(),
            num_prompt_tokens=len(request.prompt) // 4,
            max_tokens=request.max_tokens,
            n=n,
        )

    # What comes back.

    def _on_message(self, message: CoreMessage) -> None:
        if isinstance(message, Outputs):
            self._on_outputs(message)
        elif isinstance(message, UtilityReply):
            self._on_reply(message)
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
        elif isinstance(message, EngineFailed):
            self._on_failed(message)
        else:
            self._on_stopped(message)

    def _on_outputs(self, message: Outputs) -> None:
        now = time.monotonic()
        if message.step_tokens or message.outputs:
            self._progress_s = now
        requests = self._requests
        for request_id in message.started:
            entry = requests.get(request_id)
            if entry is not None:
                self._started(entry.metrics, message.started_time_s)
        for output in message.outputs:
            entry = requests.get(output.request_id)
            if entry is None:  # aborted here while the step ran there
                continue
            if output.new_token_ids:
                self._count_tokens(entry, output.new_token_ids, now)
            if output.num_cached_tokens > entry.metrics.num_cached_tokens:
                entry.metrics.num_cached_tokens = output.num_cached_tokens
            if output.finish_reason is not None:
                del requests[output.request_id]
                self._finished(entry, output.finish_reason)
            entry.stream.push(output)
        for rejected in message.rejected:
            entry = requests.pop(rejected.request_id, None)
            if entry is not None:
                self.listener.on_rejected()
                entry.stream.fail(rejected.to_error())
        stats = message.stats and add_counters(message.stats, self._former_stats)
        self.last_stats = stats or self.last_stats
        for num_tokens in message.step_tokens:
            self.listener.on_step(num_tokens, None)
        if stats is not None:
            self.listener.on_step(0, stats)

    @staticmethod
    def _started(metrics: RequestMetrics, time_s: float) -> None:
        if metrics.scheduled_time_s == 0.0:
            metrics.scheduled_time_s = time_s
        else:
            metrics.num_preemptions += 1

    def _count_tokens(self, entry: InFlight, token_ids: list[int], now: float) -> None:
        metrics = entry.metrics
        if metrics.num_generation_tokens == 0:
            metrics.first_token_time_s = now
            self.listener.on_first_token(now - metrics.arrival_time_s)
        else:
            self.listener.on_tokens(now - metrics.last_token_time_s, len(token_ids))
        metrics.last_token_time_s = now
        metrics.num_generation_tokens += len(token_ids)
        if self.config.max_restarts:
            entry.token_ids.extend(token_ids)

    def _finished(self, entry: InFlight, reason: FinishReason) -> None:
        now = time.monotonic()
        entry.metrics.finished_time_s = now
        self._finish_times_s.append(now)
        if len(self._finish_times_s) > 64:
            del self._finish_times_s[:32]
        self.listener.on_finished(entry.metrics, reason)

    def metrics_of(self, request_id: str) -> RequestMetrics | None:
        """Times and counts of a request in flight; the same object goes on being updated after it has finished."""
        entry = self._requests.get(request_id)
        return None if entry is None else entry.metrics

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
        """Whether the engine takes requests only later: it starts, or starts again."""
        return self.info is None and self._dead is None

    @property
    def is_resting(self) -> bool:
        """Whether new requests are held, by `pause` or by `sleep`."""
        return self._rest is not None

    @property
    def stalled_s(self) -> float:
        """For how long the engine has taken no step though it has requests; 0.0 while it loads or rests."""
        if not self._requests or self.is_loading or self.is_resting or self._dead is not None:
            return 0.0
        return time.monotonic() - self._progress_s

    @property
    def is_stalled(self) -> bool:
        """Whether that is longer than `stall_timeout_s`."""
        return self.stalled_s >= self.config.stall_timeout_s

    def _begin_watch(self) -> None:
        if not self._is_watched:
            self._is_watched = True
            self._watch(asyncio.get_running_loop())

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tell of a stall when it begins and when it ends, until the engine is gone."""
        if self._dead is not None:
            return
        if self.is_stalled != self._is_told_stalled:
            self._is_told_stalled = not self._is_told_stalled
            if self._is_told_stalled:
                self.listener.on_stall()
                _logger.error(
                    "the engine is stalled: it has taken no step for %.1f s (stall_timeout_s=%g) and has %d requests",
                    self.stalled_s,
                    self.config.stall_timeout_s,
                    len(self._requests),
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
        self._die(EngineDeadError(failure_text(message)))

    def _on_stopped(self, message: EngineStopped) -> None:
        for request_id in list(self._requests):  # the drain's time was over before they finished
            entry = self._requests.pop(request_id)
            self._finished(entry, FinishReason.ABORT)
            entry.stream.push(EngineCoreOutput(request_id, [], finish_reason=FinishReason.ABORT))
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(None)

    def _die(self, error: EngineDeadError) -> None:
        """Every stream and call ends with the error; the first one wins."""
        if self._dead is not None:
            return
        self._dead = error
        if self.info is not None and not self._is_stopping:
            _logger.error("the engine is gone for good: %s", first_line(error))
        entries = list(self._requests.values())
        self._requests.clear()
        self._no_engine_stats(0)
        for entry in entries:
            self._finished(entry, FinishReason.ERROR)
            entry.stream.fail(self._dead_error())
        waiting = [*self._calls.values(), *([self._ready] if self._ready is not None else [])]
        for future in waiting:
            if not future.done():
                future.set_exception(self._dead_error())
                future.exception()  # read once: nobody may be waiting any more
        self._calls.clear()

    def _no_engine_stats(self, num_waiting: int) -> None:
        """The engine is gone, for now or for good: nothing runs there, and what was counted stays counted."""
        self._former_stats = self.last_stats
        gauges = SchedulerStats(num_waiting=num_waiting, num_waiting_deferred=num_waiting)
        self.last_stats = add_counters(gauges, self._former_stats)
        self.listener.on_step(0, self.last_stats)

    def _dead_error(self) -> EngineDeadError:
        # A fresh instance each time: an exception object collects the tracebacks of all who raise it.
        return EngineDeadError(str(self._dead))

    # Control calls.

    async def stats(self) -> SchedulerStats:
        stats = msgspec.convert(await self._call("stats"), SchedulerStats)
        return add_counters(stats, self._former_stats)

    async def ping(self) -> float:
        """Round trip to the step loop, in seconds."""
        start = time.monotonic()
        await self._call("ping")
        return time.monotonic() - start

    async def pause(self, state: PauseState = PauseState.ALL_HELD) -> None:
        await self._call("pause", state=int(state))
        self._rest = None if state == PauseState.RUNNING else ("pause", {"state": int(state)})
        self._progress_s = time.monotonic()

    async def resume(self) -> None:
        await self.pause(PauseState.RUNNING)

    async def is_paused(self) -> bool:
        return bool(await self._call("is_paused"))

    async def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        return bool(await self._call("reset_prefix_cache", preempt_running=preempt_running))

    async def sleep(self, level: int = 1) -> int:
        """See `EngineCore.sleep`."""
        given_back = int(await self._call("sleep", level=level))
        self._rest = ("sleep", {"level": level})
        return given_back

    async def wake_up(self) -> None:
        """Undo `sleep`."""
        await self._call("wake_up")
        if self._rest is not None and self._rest[0] == "sleep":
            self._rest = None
        self._progress_s = time.monotonic()

    async def sleep_level(self) -> int | None:
        """How deep the engine sleeps; None while it is awake."""
        level: int | None = await self._call("sleep_level")
        return level

    async def check_integrity(self) -> str | None:
        result = await self._call("check_integrity")
        return None if result is None else str(result)

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> dict[str, Any]:
        """See `quire_interfaces.AdapterStore.load`; the fields of an `AdapterInfo`. Waits for the files."""
        info: dict[str, Any] = await self._call("load_adapter", name=name, path=path, replace=replace)
        self.adapters[name] = path
        return info

    async def unload_adapter(self, name: str) -> None:
        """See `quire_interfaces.AdapterStore.unload`."""
        await self._call("unload_adapter", name=name)
        self.adapters.pop(name, None)

    async def _call(self, method: str, **arguments: Any) -> Any:
        self.check_health()
        call_id = next(self._call_ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._send(UtilityCall(call_id=call_id, method=method, arguments=arguments))
            return await asyncio.wait_for(future, self.config.call_timeout_s)
        except TimeoutError:
            raise EngineDeadError(
                f"the engine did not answer {method!r} within call_timeout_s={self.config.call_timeout_s:g}: "
                "a step takes very long, or the engine hangs"
            ) from None
        finally:
            self._calls.pop(call_id, None)

    def _on_reply(self, message: UtilityReply) -> None:
        future = self._calls.get(message.call_id)
        if future is None or future.done():
            return
        if message.error is not None:
            future.set_exception(message.to_error())
        else:
            future.set_result(message.result)


def first_line(cause: object) -> str:
    """The first line of a cause; others repeat what the engine printed, which was logged."""
    return str(cause).partition("\n")[0]


def failure_text(message: EngineFailed) -> str:
    """Cause and remedy, as the core gave them."""
    return message.cause if not message.remedy else f"{message.cause}\n{message.remedy}"
