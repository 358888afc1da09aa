"""The scheduler's own notes on a request, and ordered collections of them.

A note lives from `add_request` to the end of the request, across preemptions. Results of steps still on the device
find their request through the note (not through the row or the id, which others may hold by then).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from quire_interfaces import Request

__all__ = ["Order", "OrderedStates", "RequestState", "order_of"]

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
    """Known tokens; `request.num_tokens` except while the request is in a `running.DecodeBatch`."""
    num_slots: int = 0
    """Tokens that fit in the blocks it holds."""
    decode_until: int = 0
    """Position from which on a decode needs a block, or must not happen because all output that is allowed is known or
    in flight."""
    cache_at: int = 0
    """Number of computed and known tokens at which the allocator is to be told that a block is complete."""
    check_from: int = 0
    """Position of a computed token from which on the result of a decode completes a block, or ends the request for
    length."""
    admitted_step: int = 0
    """Step in which it entered its present row; results of older steps belong to blocks it no longer holds."""
    valid_from_step: int = 0
    """Results of older steps are void: they were built on a step that failed."""
    num_blocks_wanted: int = 0
    """Number of free blocks to wait for: what a rule asked for, or after a preemption one more than it had, lest it be
    preempted at the same place."""
    num_prompt_logprobs_sent: int = 0
    """Prompt positions whose logprobs the client has; a preempted request computes them again."""


def order_of(state: RequestState) -> Order:
    """The key that states are sorted by."""
    return state.order


class OrderedStates:
    """States sorted by `order`; insertion and removal by bisection."""

    def __init__(self) -> None:
        self.states: list[RequestState] = []
        self._orders: list[Order] = []

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self.states)

    def index(self, state: RequestState) -> int:
        """Place of a state that is in."""
        index = bisect_left(self._orders, state.order)
        assert self.states[index] is state, f"{state.request.request_id} is not where its order says"
        return index

    def add(self, state: RequestState) -> int:
        """Insert at the place of its order, which is returned."""
        index = bisect_left(self._orders, state.order)
        self.states.insert(index, state)
        self._orders.insert(index, state.order)
        return index

    def remove(self, state: RequestState) -> int:
        """Take out a state that is in. Returns the place where it was."""
        index = self.index(state)
        del self.states[index]
        del self._orders[index]
        return index
