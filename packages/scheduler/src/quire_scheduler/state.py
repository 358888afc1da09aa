"""The scheduler's own notes on a request, and ordered collections of them.

A note lives from `add_request` to the end of the request, across preemptions. Results of steps still on the device
find their request through the note (not through the row or the id, which others may hold by then).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from quire_interfaces import Request

__all__ = ["Order", "OrderedStates", "RequestState"]

Order = tuple[tuple[float, ...], int]


@dataclass(slots=True, eq=False)
class RequestState:
    """Notes on one request. Written by the scheduler only."""

    request: Request
    order: Order
    """(key of the policy, number of arrival): smaller runs earlier and is preempted later."""
    limit: int
    """Known tokens at which the request ends for length."""
    num_tokens: int
    """Known tokens; equals request.num_tokens, kept here because the property is too slow for every step."""
    num_slots: int = 0
    """Tokens that fit in the blocks it holds."""
    cache_at: int = 0
    """Computed and known tokens from which on the allocator is told again (next block border, or 0: each step)."""
    admitted_step: int = 0
    """Step in which it entered its present row; results of older steps belong to blocks it no longer holds."""
    valid_from_step: int = 0
    """Results of older steps are void: they were built on a step that failed."""
    num_blocks_wanted: int = 0
    """After a preemption: free blocks to wait for, one more than it held, lest it be preempted at the same place."""
    tier_asked: bool = False
    """In this stay in the queue, the tier has been asked for its KV; it is not asked again."""
    num_memory_tokens: int = -1
    """Tokens that memory had when the tier was first asked; -1 before."""
    num_loadable_tokens: int = 0
    """Tokens that it would have with what a tier began to load for it."""
    num_external_tokens: int = 0
    """Tokens of a tier that it found at its first admission."""
    drafts_are_forced: bool = False
    """Whether the request's present drafts are certain: they need no verification, and nobody waits for it."""
    num_prompt_logprobs_sent: int = 0
    """Prompt positions whose logprobs the client has; a preempted request computes them again."""


class OrderedStates:
    """States sorted by `order`; insertion and removal by bisection."""

    def __init__(self) -> None:
        self.states: list[RequestState] = []
        self._orders: list[Order] = []

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self.states)

    def add(self, state: RequestState) -> None:
        """Insert at the place of its order."""
        index = bisect_left(self._orders, state.order)
        self.states.insert(index, state)
        self._orders.insert(index, state.order)

    def remove(self, state: RequestState) -> None:
        """Take out a state that is in."""
        index = bisect_left(self._orders, state.order)
        assert self.states[index] is state, f"{state.request.request_id} is not where its order says"
        del self.states[index]
        del self._orders[index]
