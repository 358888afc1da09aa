"""The step loop's body: plan, execute, collect, with up to one step planned ahead of the device.

Knows the order of calls between a `Scheduler` and an `Executor`, and what to do when a step raises. Knows no sockets,
no processes, no text, and no feature of either side.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire_engine.config import EngineConfig
from quire_engine.kv_event_publisher import KVEventPublisher
from quire_engine.messages import EngineInfo
from quire_engine.quarantine import Quarantine
from quire_engine.watch import EngineWatch, WatchedScheduler
from quire_engine.watched_requests import new_record
from quire_interfaces import (
    AdapterStore,
    ConfigError,
    EngineCoreOutput,
    EngineDeadError,
    Executor,
    FinishReason,
    ModelRunnerOutput,
    PauseState,
    QuireError,
    Request,
    RequestError,
    RequestFailure,
    RequestGate,
    Scheduler,
    SchedulerOutput,
    SchedulerStats,
)
from quire_interfaces.engine_watch import FIRST_NUMBER, RequestRecord, WatchedKVCache

__all__ = ["EngineCore", "EngineParts", "StepResult"]

FLUSH_TIMEOUT_S = 2.0


class WeightSleep(Protocol):
    """What discards weights and loads them again, with everything on the device. No step is in flight, and no request
    holds blocks, whenever it is called."""

    def discard(self, parts: EngineParts) -> int:
        """Close `parts.executor`, and let go of what it computed with; number of bytes given back."""

    def reload(self, parts: EngineParts) -> None:
        """Load the checkpoint as it is now, and give `parts` an executor as at the start. Where that raises, nothing
        has changed."""


@dataclass(slots=True, kw_only=True)
class EngineParts:
    """What a factory hands over: the two sides of an engine, put together."""

    scheduler: Scheduler
    executor: Executor
    info: EngineInfo
    gates: tuple[RequestGate, ...] = ()
    """What requests may need that is prepared beside the loop; those that are admission rules, too, are also among the
    scheduler's rules. Closed with the core."""
    adapters: AdapterStore | None = None
    """Adapters that requests may choose; None where they may not. Belongs to one of the gates."""
    add_stats: tuple[Callable[[SchedulerStats], None], ...] = ()
    """Adds what the executor's side counts."""
    take_failures: Callable[[], list[tuple[str, RequestFailure]]] | None = None
    """Requests, by id, that what is beside the runner failed since the last call; None where nothing does."""
    release_kv_cache: Callable[[], int] | None = None
    """Gives the KV cache's memory back to the system until it is written again, and says how many bytes; None where
    that cannot be."""
    weight_sleep: WeightSleep | None = None
    """Gives the memory of all that computes back, and builds that again; None where it cannot."""
    reset_encoder_cache: Callable[[], bool] | None = None
    """Forgets the embeddings of media that no running request needs, and says whether none are left; None for a network
    that takes no media."""
    kv_events: KVEventPublisher | None = None
    """Publishes what becomes findable in the prefix cache; None where nobody is to hear of it. Closed with the core."""
    kv_cache: WatchedKVCache | None = None
    """Shown to those who watch the engine; None where there are no blocks."""
    steps_ahead: int | None = None
    """Steps that may be planned ahead of the one that runs, where the executor says how many; None where the settings
    do."""
    collective_rpc: Callable[[str, Sequence[Any], Mapping[str, Any]], list[Any]] | None = None
    """Does a call on all ranks of the executor, by its name, arguments and named arguments; what each returned, in
    plain data. None where there is none."""
    reconfigure: Callable[[Mapping[str, Any]], None] | None = None
    """Takes other values than those of the start, by name, for settings that may change while requests run. Raises
    ConfigError, and changes nothing then. None where there are none."""
    check_integrity: Callable[[], None] | None = None
    """Raises when the bookkeeping of the parts contradicts itself; for tests and debugging."""


@dataclass(slots=True)
class StepResult:
    """What one call of `EngineCore.step` brought."""

    outputs: list[EngineCoreOutput] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    """Requests that entered a row with a step planned in this call."""
    started_time_s: float = 0.0
    step_tokens: list[int] = field(default_factory=list)
    """Tokens computed by each step that was collected, rejected drafts and recomputed tokens included."""
    did_something: bool = False


class EngineCore:
    """Runs requests, step by step. Not thread-safe: one thread calls everything.

    Args:
        parts: The scheduler and the executor; owned by the core from now on.
        config: Depth of the pipeline and deadlines.
    """

    def __init__(self, parts: EngineParts, config: EngineConfig | None = None) -> None:
        self.parts = parts
        self.config = config or EngineConfig()
        self._scheduler = parts.scheduler
        self._executor = parts.executor
        self._depth = self.config.depth(parts.info.device) if parts.steps_ahead is None else parts.steps_ahead
        self._in_flight: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput]]] = deque()
        self._quarantine = Quarantine()
        self._alive: set[str] = set()
        self._num_failed_steps = 0
        self._probe_next = True
        self._closed = False
        self._has_weights = True
        self.sleep_level: int | None = None
        """How deep it sleeps; None while it is awake."""

    @property
    def info(self) -> EngineInfo:
        return self.parts.info

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            OverloadedError: the scheduler's queue is full.
            RequestError: the request can never run.
        """
        prepared: list[RequestGate] = []
        try:
            for gate in self.parts.gates:
                prepared.append(gate)
                gate.prepare(request)
            self._scheduler.add_request(request)
        except Exception:
            for gate in prepared:
                gate.forget([request.request_id])
            raise
        self._alive.add(request.request_id)

    def wait_until_prepared(self, request: Request) -> None:
        """Wait for what the request needs besides its place in a step. A request that cannot have it is gone then.

        Raises:
            QuireError: why it cannot run.
        """
        try:
            for gate in self.parts.gates:
                gate.wait(request)
        except QuireError:
            self.abort_requests([request.request_id], FinishReason.ERROR)
            raise

    def abort_requests(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> list[str]:
        """End requests now, without further output. Returns the ids that were alive."""
        aborted_ids = self._scheduler.abort_requests(list(request_ids), reason)
        self._forget(aborted_ids)
        return aborted_ids

    def abort_all(self) -> list[str]:
        """End every request. Returns their ids."""
        return self.abort_requests(sorted(self._alive))

    def has_requests(self) -> bool:
        """Whether any request is not finished."""
        return self._scheduler.has_requests()

    def has_work(self) -> bool:
        """Whether `step` could do something now."""
        return bool(self._in_flight) or self._scheduler.has_work()

    @property
    def is_preparing(self) -> bool:
        """Whether some request waits for what is prepared beside the loop."""
        return any(gate.is_preparing for gate in self.parts.gates)

    def take_rejected(self) -> list[tuple[str, QuireError]]:
        """Requests that cannot have what they need, with the reason; they are gone."""
        rejected: list[tuple[str, QuireError]] = []
        for gate in self.parts.gates:
            for request_id, error in gate.take_failed():
                if self.abort_requests([request_id], FinishReason.ERROR):
                    rejected.append((request_id, error))
        return rejected

    def stats(self) -> SchedulerStats:
        stats = self._scheduler.stats()
        for gate in self.parts.gates:
            gate.add_stats(stats)
        for add_stats in self.parts.add_stats:
            add_stats(stats)
        return stats

    def watch(self) -> EngineWatch:
        """What is seen of this engine from now on, or since somebody else began to look."""
        scheduler = self._scheduler
        if isinstance(scheduler, WatchedScheduler):
            return scheduler.watch

        def end() -> None:
            self._scheduler = scheduler

        watch = EngineWatch(scheduler, self.parts.kv_cache, self.parts.gates, self.info.block_size, end)
        self._scheduler = WatchedScheduler(scheduler, watch)
        return watch

    def leave_watch(self, watcher: str) -> None:
        """Somebody looks no more."""
        if isinstance(self._scheduler, WatchedScheduler):
            self._scheduler.watch.leave(watcher)

    def explain_request(self, request_id: str) -> RequestRecord | None:
        """What is known of a request that is not finished, also where nobody has watched; None for another."""
        if isinstance(self._scheduler, WatchedScheduler):
            return self._scheduler.watch.record_of(request_id)
        request = next((each for each in self._scheduler.requests() if each.request_id == request_id), None)
        if request is None:
            return None
        record = new_record(request, FIRST_NUMBER, time.monotonic(), is_complete=False)
        record.wait_reason = self._scheduler.waiting_reason(request_id)
        return record

    def pause(self, state: PauseState) -> None:
        """Hold new requests, or all, or none (resume). The next `step` still collects a step in flight."""
        self._scheduler.pause(state)

    def sleep(self, level: int) -> int:
        """Hold all requests until `wake_up`; steps in flight must be collected before (`collect_all`).

        Args:
            level: 0 keeps everything where it is. 1 forgets the KV cache and gives its memory back: running requests
                are computed anew later. 2 discards the weights as well, which are loaded again. On an accelerator 1
                does, too: its graphs hold the addresses of both.

        Returns:
            Number of bytes given back.

        Raises:
            RequestError: a level that this engine cannot have, or it sleeps at level 2 already.
        """
        release, weights = self.parts.release_kv_cache, self.parts.weight_sleep
        if level not in (0, 1, 2):
            raise RequestError(f"level must be 0, 1 or 2, got {level!r}", param="level")
        if not self._has_weights:
            raise RequestError(
                f"the engine sleeps at level {self.sleep_level}: wake it first",
                param="level",
                code="sleeping",
            )
        if level == 2 and weights is None:
            raise RequestError(
                "this engine cannot load its weights again (its KV cache is kept in tiers as well or shared with other "
                "engines, or it is an encoder): sleep with level 0 or 1, or stop it",
                param="level",
                code="unsupported",
            )
        discards = weights is not None and (level == 2 or (level == 1 and release is None))
        if level == 1 and release is None and not discards:
            raise RequestError(
                "this engine cannot give the memory of its KV cache back (it is kept in tiers as well, or shared with "
                "other engines): sleep with level 0",
                param="level",
                code="unsupported",
            )
        self.pause(PauseState.ALL_HELD)
        num_bytes = 0
        if level > 0:
            has_reset = self.reset_prefix_cache(preempt_running=True)
            if not has_reset or (discards and not self.reset_encoder_cache()):
                self.pause(PauseState.RUNNING)
                raise RequestError("blocks of the KV cache are in use; try again", param="level", code="busy")
            if discards and weights is not None:
                num_bytes = weights.discard(self.parts)
                self._executor, self._has_weights = self.parts.executor, False
            elif release is not None:
                num_bytes = release()
        self.sleep_level = level
        return num_bytes

    def wake_up(self, tags: Collection[str] = ()) -> int | None:
        """Go on with requests. Nothing happens when it is awake.

        Args:
            tags: What to wake, as of vLLM: "weights" alone are loaded, if they were discarded, and requests are held
                still; others ("kv_cache", "scheduling") go with them. Empty for everything.

        Returns:
            The level at which it sleeps now; None when it is awake.

        Raises:
            RequestError: weights were discarded and are not among the tags.
            QuireError: they cannot be loaded; the engine sleeps on.
        """
        if self.sleep_level is None:
            return None
        if not self._has_weights and self.parts.weight_sleep is not None:
            if tags and "weights" not in tags:
                raise RequestError(
                    f"the weights were discarded (sleep level {self.sleep_level}): wake weights first, or with the "
                    "others",
                    param="tags",
                    code="sleeping",
                )
            self.parts.weight_sleep.reload(self.parts)
            self._executor, self._has_weights = self.parts.executor, True
            self.sleep_level = 1
        if not tags or set(tags) != {"weights"}:
            self.sleep_level = None
            self.pause(PauseState.RUNNING)
        return self.sleep_level

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget all cached blocks; whether it worked. Steps in flight must be collected before (`collect_all`)."""
        is_reset = self._scheduler.reset_prefix_cache(preempt_running=preempt_running)
        self._publish_kv_events()
        return is_reset

    def _publish_kv_events(self) -> None:
        if self.parts.kv_events is not None:
            self.parts.kv_events.publish()

    def reset_encoder_cache(self) -> bool:
        """Forget the embeddings of media that no running request needs; whether none are left."""
        reset = self.parts.reset_encoder_cache
        return reset is None or reset()

    def collective_rpc(self, method: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """What all ranks return to a call, by rank; steps in flight must be collected before (`collect_all`).

        Raises:
            RequestError: the engine has no such calls, or the call refuses.
        """
        call = self.parts.collective_rpc
        if call is None:
            raise RequestError("this engine was assembled without calls of its ranks", code="unsupported")
        return call(method, arguments, named)

    def reconfigure(self, values: Mapping[str, Any]) -> None:
        """Change settings from the next step on.

        Args:
            values: Name -> value of all that are to be others than at the start.

        Raises:
            RequestError: a value is not possible, or the engine has no such settings; nothing has changed.
        """
        if self.parts.reconfigure is None:
            raise RequestError("settings of this engine cannot change while it runs", code="unsupported")
        try:
            self.parts.reconfigure(values)
        except ConfigError as error:
            raise RequestError(str(error), param=error.field) from None

    def step(self) -> StepResult:
        """Plan steps up to the depth, then wait for the oldest one and collect what it produced.

        Raises:
            EngineDeadError: the device hangs, or fails whatever it is given.
        """
        result = StepResult()
        if self._quarantine:
            self._step_in_quarantine(result)
            return result
        while len(self._in_flight) <= self._depth and self._launch(None, result):
            pass
        if self._in_flight:
            self._collect(result)
        return result

    def collect_all(self) -> StepResult:
        """Collect what every step in flight produced, and plan no new one."""
        result = StepResult()
        while self._in_flight:
            self._collect(result)
        return result

    def flush(self) -> None:
        """Run the steps that only carry computed blocks to where they are kept, when no request needs the device.

        For an orderly end: the last blocks of the last requests are not in a step yet. Gives up after
        `FLUSH_TIMEOUT_S`, or when a step fails, for what is lost is only to be computed again.
        """
        deadline_s = time.monotonic() + FLUSH_TIMEOUT_S
        result = StepResult()
        while not (self._closed or self._scheduler.has_requests()) and self.has_work():
            if not self._in_flight and not self._launch(None, result):
                return
            _, future = self._in_flight[0]
            if wait([future], timeout=deadline_s - time.monotonic()).not_done or future.exception() is not None:
                return
            self._collect(result)

    def close(self) -> None:
        """Abort what is left, let steps in flight end, and give the executor's memory back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for _, future in self._in_flight:
            future.cancel()
        self._in_flight.clear()
        for gate in self.parts.gates:
            gate.close()
        self._executor.close()
        if self.parts.kv_events is not None:
            self.parts.kv_events.close()

    def _launch(self, only: frozenset[str] | None, result: StepResult) -> bool:
        now = time.monotonic()
        output = self._scheduler.schedule(only)
        if output is None:
            return False
        result.did_something = True
        if output.new_rows:
            result.started_time_s = now
            result.started.extend([row.request_id for row in output.new_rows])
        try:
            future = self._executor.execute(output)
        except Exception as error:  # treated like a step that raised later
            future = Future()
            future.set_exception(error)
        self._in_flight.append((output, future))
        return True

    def _collect(self, result: StepResult) -> bool:
        """Wait for the oldest step. Whether it succeeded."""
        output, future = self._in_flight.popleft()
        result.did_something = True
        try:
            runner_output = future.result(timeout=self.config.step_timeout_s)
        except TimeoutError as error:
            if not future.done():
                raise EngineDeadError(
                    f"step {output.step_id} took longer than step_timeout_s={self.config.step_timeout_s:g}: "
                    "the device hangs, or the limit is too small for this machine"
                ) from None
            self._step_failed(output, error, result)
            return False
        except EngineDeadError:  # a rank is gone: no step can succeed any more
            raise
        except Exception as error:
            self._step_failed(output, error, result)
            return False
        self._num_failed_steps = 0
        outputs = self._scheduler.update(output, runner_output)
        self._publish_kv_events()
        if output.total_num_scheduled_tokens:
            result.step_tokens.append(output.total_num_scheduled_tokens)
        result.outputs.extend(outputs)
        self._forget([each.request_id for each in outputs if each.finish_reason is not None])
        if self.parts.take_failures is not None:
            for request_id, failure in self.parts.take_failures():
                if self.abort_requests([request_id], FinishReason.ERROR):
                    result.outputs.append(EngineCoreOutput(request_id, [], FinishReason.ERROR, failure=failure))
        if self._quarantine:
            self._quarantine.step_succeeded(output)
        return True

    def _forget(self, request_ids: list[str]) -> None:
        if request_ids:
            self._alive.difference_update(request_ids)
            for gate in self.parts.gates:
                gate.forget(request_ids)
            if self._quarantine:
                self._quarantine.clear(request_ids)

    def _step_failed(self, output: SchedulerOutput, error: Exception, result: StepResult) -> None:
        self._num_failed_steps += 1
        # Steps planned on top of the failed one computed with tokens that never came: newest first, undo them all.
        while self._in_flight:
            later, future = self._in_flight.pop()
            self._wait(later, future)
            self._scheduler.discard_step(later)
        self._scheduler.discard_step(output)
        cause = f"{type(error).__name__}: {error}"
        if self._num_failed_steps >= self.config.max_failed_steps:
            raise EngineDeadError(
                f"{self._num_failed_steps} steps failed one after another, the last with {cause}. "
                "The device is taken for broken; look for its own messages above"
            ) from error
        culprit = self._quarantine.step_failed(output) if output.request_ids else None
        if culprit is not None and self.abort_requests([culprit], FinishReason.ERROR):
            failure = RequestFailure(f"the model could not compute this request: {cause}")
            result.outputs.append(EngineCoreOutput(culprit, [], FinishReason.ERROR, failure=failure))

    def _wait(self, output: SchedulerOutput, future: Future[Any]) -> None:
        try:
            future.exception(timeout=self.config.step_timeout_s)
        except TimeoutError:
            raise EngineDeadError(
                f"step {output.step_id} took longer than step_timeout_s={self.config.step_timeout_s:g}"
            ) from None

    def _step_in_quarantine(self, result: StepResult) -> None:
        """Suspects and everybody else take turns, one step at a time, never together."""
        group = self._quarantine.group
        others = frozenset(self._alive - self._quarantine.suspects)
        turns = (group, others) if self._probe_next else (others, group)
        self._probe_next = not self._probe_next
        for only in turns:
            if only and self._launch(only, result):
                self._collect(result)
                return
        # Nobody can run (held, or out of blocks): let the group go, or waiting for it would be forever.
        self._quarantine.clear(group)
