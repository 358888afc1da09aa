"""Finding stop strings in a text that arrives in pieces.

Knows characters; knows no tokens. One Knuth-Morris-Pratt automaton per stop string (Knuth, Morris, Pratt 1977,
"Fast pattern matching in strings"), so each character costs constant time however the text is cut, and the automaton's
state says exactly how much of the text's end may still become a stop string.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["StopMatch", "StopMatcher"]


class StopMatch(NamedTuple):
    """A stop string was completed."""

    stop: str
    end: int
    """Offset just after the stop string, in the text given to the feed() call."""


class StopMatcher:
    """Looks for the stop string that is completed first; of two completed by the same character, the longer.

    Args:
        stops: Non-empty strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self.num_withheld = 0
        """Characters at the end of all text fed so far that may become part of a stop string."""

    def feed(self, text: str, *, may_stop: bool = True) -> StopMatch | None:
        """Take in text.

        Args:
            text: The next characters.
            may_stop: False passes over stop strings that are completed in this text.

        Returns:
            The match, after which the matcher must not be used again; or None.
        """
        best: StopMatch | None = None
        for index, stop in enumerate(self._stops):
            if self._states[index] == 0 and stop[0] not in text:
                continue
            end = self._advance(index, text, may_stop)
            if end and (best is None or (end, -len(stop)) < (best.end, -len(best.stop))):
                best = StopMatch(stop, end)
        self.num_withheld = max(self._states, default=0)
        return best

    def _advance(self, index: int, text: str, may_stop: bool) -> int:
        """Run one automaton over `text`; the offset after the first match, or 0."""
        stop, failure, state = self._stops[index], self._failures[index], self._states[index]
        length = len(stop)
        for position, char in enumerate(text):
            while state and stop[state] != char:
                state = failure[state]
            if stop[state] == char:
                state += 1
            if state == length:
                if may_stop:
                    return position + 1
                state = failure[length]
        self._states[index] = state
        return 0


@functools.lru_cache(maxsize=256)
def _failure_table(stop: str) -> Sequence[int]:
    """table[k]: length of the longest proper border (prefix that is a suffix) of stop[:k]. The completions of a request
    share it; nobody changes it."""
    table = [0] * (len(stop) + 1)
    border = 0
    for position in range(1, len(stop)):
        while border and stop[border] != stop[position]:
            border = table[border]
        if stop[border] == stop[position]:
            border += 1
        table[position + 1] = border
    return table
