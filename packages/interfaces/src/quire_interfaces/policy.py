"""Seams of the scheduler: ordering, admission, and the scheduler itself as the engine sees it."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from quire_interfaces.errors import QuireError
from quire_interfaces.kv_cache import CachedPrefix
from quire_interfaces.request import FinishReason, Request
from quire_interfaces.step import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput, SchedulerStats

__all__ = ["AdmissionRule", "PauseState", "RequestGate", "Reservation", "Scheduler", "SchedulingPolicy"]


class PauseState(enum.IntEnum):
    """Pausing: nothing, new requests held in the queue, or all requests held where they are."""

    RUNNING = 0
    NEW_HELD = 1
    ALL_HELD = 2


class SchedulingPolicy(Protocol):
    """Order of the waiting queue, and who is preempted first."""

    def sort_key(self, request: Request) -> tuple[float, ...]:
        """Smaller runs earlier. Must not change while the request waits."""


class Reservation(NamedTuple):
    """A rule's answer to a request that is about to be admitted (`AdmissionRule.reserve`)."""

    is_granted: bool
    num_blocks_wanted: int = 0
    """Where KV blocks are what lacks: number of free blocks at which asking again is worth while."""


class AdmissionRule(Protocol):
    """One resource that requests need. The schedule loop knows every resource (adapter slots, an encoder's budget,
    grammars, a KV tier, draft tokens) only through this; a new resource is a new rule.

    A class that inherits from it overrides what concerns it: all methods have bodies that restrict nothing. For a
    waiting request, `admits` is asked first, then `reserve`; `admitted` follows in the same step, or never. Every
    `admitted` is followed by exactly one `released`: on finish, abort, preemption and after a failed step.
    """

    name: str
    """Shown as the reason why a request waits."""

    holds_queue: bool
    """True: while one request is refused, nobody behind it is admitted (a resource all compete for, so that the first
    in the order is not starved). False: the requests behind it may pass (a reason of this request alone)."""

    # When a request arrives, enters a row, leaves it, and ends.

    def check(self, request: Request) -> None:
        """A request arrives. Changes nothing.

        Raises:
            RequestError: it can never have the resource.
        """
        return

    def admits(self, request: Request) -> bool:
        """Whether the resource is there now. Must not change anything; asked for statistics too."""
        return True

    def reserve(self, request: Request, cached: CachedPrefix) -> Reservation:
        """Every rule admits the request: take its share of the step's budget, or begin to prepare what it needs.

        If it is not admitted in this step after all (too few blocks, or another rule refuses), the share is lost until
        the next `admission_begins`.

        Args:
            cached: What the KV cache has of it.
        """
        return Reservation(True)

    def admitted(self, request: Request) -> None:
        """The request was put in a row: take the resource. `num_cached_tokens` is set, and `row`."""
        return

    def released(self, request: Request) -> None:
        """The request left its row (finished or preempted): give the resource back."""
        return

    def ended(self, request: Request) -> None:
        """The request ended, in its row (then `released` came before) or in the queue: forget it."""
        return

    # In each step.

    def admission_begins(self) -> None:
        """Waiting requests are about to be admitted to a step, if they can be: refill budgets that are per step."""
        return

    def allowed_tokens(self, request: Request, start: int, num_tokens: int) -> int:
        """Number of tokens, at most `num_tokens` from position `start` on, that the request may compute in this step;
        asked of requests that compute known tokens, the waiting ones after `reserve`. 0 lets it wait."""
        return num_tokens

    def step_planned(self, output: SchedulerOutput, *, is_idle: bool) -> bool:
        """The requests of the step are chosen: write into `output` what the resource sends along.

        Args:
            is_idle: The step computes nothing, and no step before it is in flight.

        Returns:
            Whether the step has to be run for that, even if it computes nothing.
        """
        return False

    def step_ended(self, result: ModelRunnerOutput) -> None:
        """Take in what a step's result says of the resource. Called before the requests of the step are updated."""
        return

    def step_discarded(self, output: SchedulerOutput) -> None:
        """A step that was planned failed as a whole; its requests are planned anew."""
        return

    def has_work(self, *, is_idle: bool) -> bool:
        """Whether a step would be of use although no request needs one; `is_idle`: none is in flight."""
        return False

    def add_counters(self, stats: SchedulerStats) -> None:
        """Add what it counted to the scheduler's statistics; `stats` is a copy for the caller."""
        return

    # KV blocks that no request holds.

    @property
    def holds_blocks(self) -> bool:
        """Whether it holds KV blocks, which come back some time: then nobody fails for want of blocks."""
        return False

    @property
    def returns_blocks_soon(self) -> bool:
        """Whether it holds KV blocks worth waiting for: then nobody is preempted for want of blocks."""
        return False

    # What running requests compute beyond their known tokens.

    @property
    def is_watching(self) -> bool:
        """Whether it wants to be asked the following about running requests in the next step. While no rule does, the
        scheduler plans decodes together and looks at no single one."""
        return False

    def defers(self, request: Request) -> bool:
        """Whether the running request has to sit out this step."""
        return False

    def offer(self, request: Request, max_tokens: int) -> int:
        """Number of tokens, at most `max_tokens` (which may be below 1), that the running request should compute in
        this step behind its last known one. Nobody is preempted for them. What is not `placed` is dropped."""
        return 0

    def placed(self, request: Request, num_tokens: int, output: SchedulerOutput) -> None:
        """So many offered tokens are in the step and have blocks: write them into `output`."""
        return

    def num_lookahead_slots(self, request: Request) -> int:
        """Number of KV slots to set aside behind a request's step that samples, if blocks for them are free."""
        return 0


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
        """Take in what a step produced: append tokens, verify drafts, finish requests.

        Returns:
            One output for each request with new tokens or an end, in the order of the step.
        """

    def discard_step(self, output: SchedulerOutput) -> None:
        """The step was handed out but failed as a whole and left no trace: put its requests back as they were before
        it (recompute), so that they can be scheduled again."""

    def has_requests(self) -> bool:
        """Whether any request waits or runs."""

    def has_work(self) -> bool:
        """Whether `schedule` could return a step now (False while everything is held or in flight)."""

    def num_requests(self) -> tuple[int, int]:
        """(running, waiting)."""

    def requests(self) -> list[Request]:
        """All that wait or run, in the order in which they came."""

    def waiting_reason(self, request_id: str) -> str | None:
        """Why a request waits: "paused", "tokens_in_flight", the name of the rule that refuses it, or "capacity"; None
        for one that does not wait. Changes nothing."""

    def pause(self, state: PauseState) -> None: ...

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget all cached blocks; with `preempt_running`, running requests are preempted first."""

    def stats(self) -> SchedulerStats: ...
