"""Seams of the scheduler: ordering, admission, and the scheduler itself as the engine sees it."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Protocol

from quire_interfaces.errors import QuireError
from quire_interfaces.request import FinishReason, Request
from quire_interfaces.step import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput, SchedulerStats

__all__ = ["AdmissionRule", "PauseState", "RequestGate", "Scheduler", "SchedulingPolicy"]


class PauseState(enum.IntEnum):
    """Pausing: nothing, new requests held in the queue, or all requests held where they are."""

    RUNNING = 0
    NEW_HELD = 1
    ALL_HELD = 2


class SchedulingPolicy(Protocol):
    """Order of the waiting queue, and who is preempted first."""

    def sort_key(self, request: Request) -> tuple[float, ...]:
        """Smaller runs earlier. Must not change while the request waits."""


class AdmissionRule(Protocol):
    """One resource that a waiting request needs before it may run. The schedule loop knows rules only through this."""

    name: str
    """Shown as the reason why a request waits."""

    holds_queue: bool
    """True: while one request is refused, nobody behind it is admitted (a resource all compete for, so that the first
    in the order is not starved). False: the requests behind it may pass (a reason of this request alone)."""

    def admits(self, request: Request) -> bool:
        """Whether the resource is there now. Must not change anything."""

    def admitted(self, request: Request) -> None:
        """The request was put in a row: take the resource."""

    def released(self, request: Request) -> None:
        """The request left its row (finished or preempted): give the resource back."""


class RequestGate(Protocol):
    """Something that some requests need before they may run and that is prepared beside the engine's loop; it can fail.
    Usually an `AdmissionRule` too, by which the scheduler lets others pass meanwhile. One thread calls everything."""

    @property
    def is_preparing(self) -> bool:
        """Whether some request waits for it, so that `take_failed` should be asked again soon."""

    def prepare(self, request: Request) -> None:
        """Start preparing what the request needs, if it needs anything; called once, before the scheduler's
        `add_request`.

        Raises:
            QuireError: it is known already that this request cannot have it.
        """

    def wait(self, request: Request) -> None:
        """Wait until what was prepared is there (for fronts without a loop). Raises like `prepare`."""

    def take_failed(self) -> list[tuple[str, QuireError]]:
        """Requests (by id) whose preparation failed or took too long since the last call, with the reason."""

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests have ended, however; unknown ids are ignored."""

    def add_stats(self, stats: SchedulerStats) -> None:
        """Write its counters, if it has any, into the fields that are its own."""

    def close(self) -> None:
        """Stop preparing. Idempotent."""


class Scheduler(Protocol):
    """Chooses what each step computes. Deterministic: the same calls give the same outputs.

    The engine calls `schedule`, hands the output to the executor, and calls `update` with the results in the same
    order; with asynchronous scheduling one further `schedule` may come before the `update` of the step before.
    """

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            OverloadedError: the waiting queue is full.
            RequestError: it can never run (prompt longer than the whole KV cache), or its id is in use.
        """

    def abort_requests(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> list[str]:
        """End these requests now, wherever they are; their rows and blocks are free at once for the next `schedule`.
        Returns the ids that were alive. Unknown ids are ignored. No `EngineCoreOutput` is produced for them."""

    def schedule(self, only: frozenset[str] | None = None) -> SchedulerOutput | None:
        """Plan the next step and advance the requests in it. None when there is nothing to compute or to free.

        Args:
            only: Request ids: the step may hold only these (the engine bisects a failing step with it, after
                `discard_step`); None allows all.
        """

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Take in what a step produced: append tokens, verify drafts, finish requests. Returns news per request."""

    def discard_step(self, output: SchedulerOutput) -> None:
        """The step was handed out but failed as a whole and left no trace: put its requests back as they were before
        it (recompute), so that they can be scheduled again."""

    def has_requests(self) -> bool:
        """Whether any request waits or runs."""

    def has_work(self) -> bool:
        """Whether `schedule` could return a step now (False while everything is held or in flight)."""

    def num_requests(self) -> tuple[int, int]:
        """(running, waiting)."""

    def pause(self, state: PauseState) -> None: ...

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget all cached blocks; with `preempt_running`, running requests are preempted first."""

    def stats(self) -> SchedulerStats: ...
