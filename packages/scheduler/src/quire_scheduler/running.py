"""The running requests in the order of the policy, and the first of them as a batch of plain decodes.

In most steps most requests do one thing: compute the token that was sampled last and sample the next. For these the
step is planned and taken in column by column, without a look at any single request, except where one crosses the border
of a block, reaches its length or meets a stop token. So the cost of a step follows what changes in it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import compress, islice
from operator import ge
from typing import Any

from quire_interfaces import SchedulerOutput
from quire_scheduler.state import OrderedStates, RequestState, order_of

__all__ = ["NO_DECODES", "DecodeBatch", "RunningStates", "ScheduledStep"]


@dataclass(slots=True)
class DecodeBatch:
    """Requests that compute one token each: parallel columns, in the order of the policy.

    While a request is in the batch, `positions` and the length of its output are the truth about its progress; the
    counts in `Request` and `RequestState` are brought up to date when somebody needs them (`RunningStates.refresh`).
    Steps in flight hold the batch that they were planned with, so once shared, it only moves on: where members change,
    a copy takes its place.
    """

    states: list[RequestState] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    output_token_ids: list[list[int]] = field(default_factory=list)
    num_cached_tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Position of the token that the next step computes; a new list for each step, which hands it out."""
    decode_until: array[int] = field(default_factory=lambda: array("q"))
    """Position from which on a decode needs a block, or must not happen because of the request's length."""
    check_from: array[int] = field(default_factory=lambda: array("q"))
    """Position of a computed token from which on the result completes a block or ends the request for length."""

    def __len__(self) -> int:
        return len(self.states)

    def columns(self) -> tuple[Any, ...]:
        """All lists, in the order of the fields."""
        return (
            self.states,
            self.rows,
            self.request_ids,
            self.output_token_ids,
            self.num_cached_tokens,
            self.positions,
            self.decode_until,
            self.check_from,
        )

    def append(self, state: RequestState) -> None:
        """Add a request behind the others."""
        request = state.request
        self.states.append(state)
        self.rows.append(request.row)
        self.request_ids.append(request.request_id)
        self.output_token_ids.append(request.output_token_ids)
        self.num_cached_tokens.append(request.num_cached_tokens)
        self.positions.append(request.num_computed_tokens)
        self.decode_until.append(state.decode_until)
        self.check_from.append(state.check_from)

    def refresh(self, index: int) -> None:
        """Write a request's progress into it."""
        state, position = self.states[index], self.positions[index]
        request = state.request
        state.num_tokens = request.num_tokens
        request.num_computed_tokens = position
        request.num_in_flight_tokens = position + 1 - state.num_tokens

    def due(self) -> list[int]:
        """Indexes of the requests that need a block, or have nothing to compute any more."""
        return list(compress(range(len(self.states)), map(ge, self.positions, self.decode_until)))


NO_DECODES = DecodeBatch()
"""Of a step whose entries were planned one by one; not to be changed."""


@dataclass(slots=True)
class ScheduledStep:
    """A step from its planning to its result."""

    output: SchedulerOutput
    members: list[RequestState]
    """Per entry of `output`, its request."""
    decodes: DecodeBatch
    """The requests of the first entries, where these were planned together; not to be changed. They stood at the first
    of `output.num_computed_tokens`."""
    departed: list[RequestState] = field(default_factory=list)
    """Requests that left the batch of decodes, or their rows, while the step was in flight; members or not."""

    def begin_with(self, batch: DecodeBatch) -> None:
        """Begin with an entry of one token for each request of a batch. The lists are shared until `add` is called."""
        output = self.output
        num_entries = len(batch.states)
        self.decodes = batch
        self.members = batch.states
        output.rows = batch.rows
        output.request_ids = batch.request_ids
        output.num_computed_tokens = batch.positions
        output.num_scheduled_tokens = [1] * num_entries
        output.samples = [True] * num_entries
        output.total_num_scheduled_tokens = num_entries

    def add(self, state: RequestState, num_tokens: int, *, samples: bool) -> None:
        """Append an entry for a request, from `num_computed_tokens` on."""
        request, output = state.request, self.output
        if self.members is self.decodes.states:
            self.members = self.members.copy()
            output.rows = output.rows.copy()
            output.request_ids = output.request_ids.copy()
            output.num_computed_tokens = output.num_computed_tokens.copy()
        self.members.append(state)
        output.rows.append(request.row)
        output.request_ids.append(request.request_id)
        output.num_computed_tokens.append(request.num_computed_tokens)
        output.num_scheduled_tokens.append(num_tokens)
        output.samples.append(samples)
        output.total_num_scheduled_tokens += num_tokens


class RunningStates(OrderedStates):
    """The running requests. The first `num_covered` of them are in `decodes`, or have nothing to compute until a result
    comes in; the others are looked at one by one in every step.

    Args:
        in_flight: The step that is being planned and those whose results are to come; they learn who departed.
    """

    def __init__(self, in_flight: Mapping[int, ScheduledStep]) -> None:
        super().__init__()
        self._in_flight = in_flight
        self.decodes = DecodeBatch()
        self._is_shared = False
        """Steps in flight hold the lists of `decodes`: copy them before members change."""
        self.num_covered = 0

    def add(self, state: RequestState) -> int:
        """Insert at the place of its order; those behind it are looked at one by one in the next step."""
        index = super().add(state)
        if index < self.num_covered:
            self._uncover(index)
        return index

    def remove(self, state: RequestState) -> int:
        """Take out a state that is in; its progress is up to date then."""
        index = super().remove(state)
        if index < self.num_covered:
            self.num_covered -= 1
            entry = self._entry(state)
            if entry is not None:
                self._delete(entry, entry + 1)
        for step in self._in_flight.values():
            step.departed.append(state)
        return index

    def refresh(self, state: RequestState) -> None:
        """Bring the progress up to date that is written in a request and its state."""
        entry = self._entry(state)
        if entry is not None:
            self.decodes.refresh(entry)

    def uncover(self, state: RequestState | None = None) -> None:
        """From this request on (None: from the first), all are to be looked at one by one, and are up to date."""
        index = 0 if state is None else self.index(state)
        if index < self.num_covered:
            self._uncover(index)

    def cover_decodes(self) -> None:
        """Take requests that only decode now into the batch, up to the first one that does not."""
        states, is_decode = self.states, True
        while is_decode and self.num_covered < len(states):
            state = states[self.num_covered]
            request = state.request
            num_known = state.num_tokens + request.num_in_flight_tokens
            if num_known < state.limit:
                # A prompt of which one token is left looks alike, but its result counts otherwise.
                is_decode = request.num_computed_tokens == num_known - 1 >= len(request.prompt_token_ids)
                if is_decode:
                    self._own_columns()
                    self.decodes.append(state)
            self.num_covered += is_decode

    def leave_decodes(self, entries: list[int]) -> None:
        """These requests of the batch have nothing to compute until a result comes in."""
        for entry in reversed(entries):
            self._delete(entry, entry + 1)

    def plan_decodes(self, step: ScheduledStep) -> None:
        """Begin a step with the batch, which moves on by one token each."""
        decodes = self.decodes
        step.begin_with(decodes)
        decodes.positions = [position + 1 for position in decodes.positions]
        self._is_shared = True

    def rest(self) -> Iterator[RequestState]:
        """The requests that are not covered; those behind the one at hand may be removed meanwhile."""
        return islice(self.states, self.num_covered, None)

    def has_decodes(self) -> bool:
        """Whether a request of the batch has something to compute."""
        decodes = self.decodes
        return any(
            position < state.limit - 1 for position, state in zip(decodes.positions, decodes.states, strict=True)
        )

    def _entry(self, state: RequestState) -> int | None:
        """Where the request is in the batch, if it is."""
        states = self.decodes.states
        entry = bisect_left(states, state.order, key=order_of)
        return entry if entry < len(states) and states[entry] is state else None

    def _uncover(self, index: int) -> None:
        first = bisect_left(self.decodes.states, self.states[index].order, key=order_of)
        self.num_covered = index
        self._delete(first, len(self.decodes))

    def _delete(self, begin: int, end: int) -> None:
        """Take entries out of the batch."""
        if begin == end:
            return
        for entry in range(begin, end):
            self.decodes.refresh(entry)
        for step in self._in_flight.values():
            step.departed.extend(self.decodes.states[begin:end])
        self._own_columns()
        for column in self.decodes.columns():
            del column[begin:end]

    def _own_columns(self) -> None:
        if self._is_shared:
            self.decodes = DecodeBatch(*[column[:] for column in self.decodes.columns()])
            self._is_shared = False
