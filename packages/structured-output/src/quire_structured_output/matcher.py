"""`OutputMatcher`: a backend's matcher as a whole output needs it, thinking before the answer included.

Adds two things to a grammar. The span in which the model thinks is free, but for its end: the output cannot be over
within it, so that the grammar behind it holds for every output that ends by itself. And where the
grammar leaves no choice of *text*, the tokens are fixed to the tokenizer's own way of writing that text: so they can be
computed together, and which tokens may come next is still a function of the tokens before, never of the batch. Knows
token ids and no text.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection
from typing import NamedTuple

from quire_interfaces import GrammarMatcher, ReasoningSpan

__all__ = ["OutputMatcher"]

_HISTORY = 1024
"""Accepted tokens that can be taken back."""


class _Phase(enum.Enum):
    OPENING = enum.auto()
    """First position: the output may begin to think, or answer at once."""
    STARTING = enum.auto()
    """Within the tokens that begin the thinking."""
    THINKING = enum.auto()
    ANSWER = enum.auto()
    OVER = enum.auto()


class _State(NamedTuple):
    phase: _Phase
    tail: tuple[int, ...]
    """While thinking: the last tokens, as many as its end has."""
    forced: tuple[int, ...]
    """Tokens that are fixed, those behind `num_passed` of them still to come; found once for the whole of them."""
    num_passed: int
    num_inner: int
    """Tokens the inner matcher has accepted."""


class OutputMatcher:
    """A `GrammarMatcher` for a whole output.

    Args:
        inner: The grammar's own matcher, at its beginning; owned from now on.
        eos_token_ids: Tokens that end an output.
        reasoning: Where the model thinks before the grammar begins.
        max_forced_tokens: Most fixed tokens told at once; 0 fixes none and leaves every token to be sampled.
    """

    def __init__(
        self,
        inner: GrammarMatcher,
        eos_token_ids: Collection[int],
        reasoning: ReasoningSpan | None = None,
        max_forced_tokens: int = 0,
    ) -> None:
        self._inner = inner
        self._eos_token_ids = frozenset(eos_token_ids)
        self._start = reasoning.start_token_ids if reasoning else ()
        self._end = reasoning.end_token_ids if reasoning else ()
        self._max_forced = max_forced_tokens
        self._history: deque[_State] = deque(maxlen=_HISTORY)
        if reasoning is not None and reasoning.is_open:
            self._state = _State(_Phase.THINKING, (), (), 0, 0)
        elif self._start:
            self._state = _State(_Phase.OPENING, (), (), 0, 0)
        else:
            self._state = _State(_Phase.ANSWER, (), self._fixed(), 0, 0)

    @property
    def allows_all(self) -> bool:
        """Whether the output is over, behind which nothing is restricted."""
        return self._state.phase is _Phase.OVER

    @property
    def is_terminated(self) -> bool:
        """Whether an end token was accepted."""
        return self._state.phase is _Phase.OVER

    def fill_bitmask(self, bitmask: memoryview) -> None:
        """Write which tokens may come next: while thinking all but end tokens, else the fixed one or the grammar's."""
        words = bitmask.cast("B").cast("I") if bitmask.format != "I" else bitmask
        if self._state.phase in (_Phase.THINKING, _Phase.OVER):
            words[:] = memoryview(b"\xff" * words.nbytes).cast("I")
            if self._state.phase is _Phase.THINKING:
                for token_id in self._eos_token_ids:
                    words[token_id // 32] &= ~(1 << (token_id % 32)) & 0xFFFFFFFF
        elif self._state.forced:
            words[:] = memoryview(bytes(words.nbytes)).cast("I")
            _set(words, self._state.forced[self._state.num_passed])
        else:
            self._inner.fill_bitmask(bitmask)
            if self._state.phase is _Phase.OPENING:
                _set(words, self._start[0])

    def forced_token_ids(self) -> list[int]:
        """Fixed tokens that are still to come, at most `max_forced_tokens` of them."""
        state = self._state
        return list(state.forced[state.num_passed : state.num_passed + max(1, self._max_forced)])

    def accept(self, token_id: int) -> bool:
        """Go on by one token; False, and nothing changes, when it may not come."""
        following = self._after(token_id)
        if following is None:
            return False
        self._history.append(self._state)
        self._state = following
        return True

    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens."""
        assert num_tokens <= len(self._history), f"{num_tokens} tokens back, {len(self._history)} are remembered"
        before = self._state
        for _ in range(num_tokens):
            before = self._history.pop()
        if self._state.num_inner > before.num_inner:
            self._inner.rollback(self._state.num_inner - before.num_inner)
        self._state = before

    def _after(self, token_id: int) -> _State | None:
        """The state after one more token; None when it may not come. The inner matcher goes along."""
        phase, tail, forced, num_passed, num_inner = self._state
        if phase is _Phase.OVER or (forced and token_id != forced[num_passed]):
            return None
        if phase is _Phase.OPENING and token_id == self._start[0]:
            phase, forced = _Phase.STARTING, self._start
        num_passed += 1
        if num_passed >= len(forced):
            forced, num_passed = (), 0
        if phase is _Phase.STARTING:
            return _State(_Phase.STARTING if forced else _Phase.THINKING, (), forced, num_passed, num_inner)
        if phase is _Phase.THINKING:
            return self._after_thought(token_id, tail, num_inner)
        if not self._inner.accept(token_id):
            return None
        if self._inner.is_terminated:
            return _State(_Phase.OVER, (), (), 0, num_inner + 1)
        return _State(_Phase.ANSWER, (), forced or self._fixed(), num_passed, num_inner + 1)

    def _after_thought(self, token_id: int, tail: tuple[int, ...], num_inner: int) -> _State | None:
        if token_id in self._eos_token_ids:
            return None
        tail = (*tail, token_id)[-len(self._end) :]
        if tail == self._end:
            return _State(_Phase.ANSWER, (), self._fixed(), 0, num_inner)
        return _State(_Phase.THINKING, tail, (), 0, num_inner)

    def _fixed(self) -> tuple[int, ...]:
        return tuple(self._inner.forced_token_ids()) if self._max_forced else ()


def _set(words: memoryview, token_id: int) -> None:
    words[token_id // 32] |= 1 << (token_id % 32)
