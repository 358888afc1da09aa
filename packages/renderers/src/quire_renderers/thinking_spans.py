"""Where in an output the model thinks, and where in the text that was fed a parser stands.

Some texts that are fed never reach the parser's buffer (special tokens that the detokenizer had to keep); places are
counted in the text with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_renderers.format_states import CompiledExits

__all__ = ["SourceText", "ThinkingSpan", "ThinkingSpans"]


@dataclass(slots=True)
class ThinkingSpan:
    """Where in an output the model thinks, in characters of the text that was fed."""

    begin: int
    """Behind the marker that opened it."""
    end: int | None = None
    """Before the marker that closed it; None while it is open."""
    after: int | None = None
    """Behind that marker."""


class SourceText:
    """Counts characters of the text that was fed, and leaves out what is no text.

    Args:
        dropped: Texts to leave out; None for none.
    """

    def __init__(self, dropped: CompiledExits | None) -> None:
        self._dropped = dropped
        self._undropped = ""
        self._num_buffered = 0
        self._left_out: list[tuple[int, int]] = []
        """Of each dropped text: how many characters had entered the buffer before it, and its length."""

    def feed(self, text: str, *, final: bool = False) -> str:
        """What of more text enters the buffer.

        Args:
            text: What was fed.
            final: No more will come.
        """
        if self._dropped is not None:
            text = self._without_dropped(text, self._dropped, final=final)
        self._num_buffered += len(text)
        return text

    def insert(self, num_after: int) -> None:
        """One character enters the buffer that was never fed.

        Args:
            num_after: Characters of the buffer behind it.
        """
        self._left_out.append((self._num_buffered - num_after, -1))
        self._num_buffered += 1

    def place(self, num_after: int) -> int:
        """Characters fed before the last `num_after` of the buffer."""
        place = self._num_buffered - num_after
        return place + sum(length for before, length in self._left_out if before < place)

    def _without_dropped(self, text: str, dropped: CompiledExits, *, final: bool) -> str:
        self._undropped += text
        kept, num_kept = [], 0
        while self._undropped:
            end, marker = dropped.find(self._undropped, final=final)
            kept.append(self._undropped[:end])
            num_kept += end
            self._undropped = self._undropped[end + len(marker or "") :]
            if marker is None:
                break
            self._left_out.append((self._num_buffered + num_kept, len(marker)))
        return "".join(kept)


class ThinkingSpans:
    """The spans of an output's thinking, in order."""

    def __init__(self) -> None:
        self.spans: list[ThinkingSpan] = []
        self._undecided_begin: int | None = None
        """Where text behind a call began that is thinking only if something ends it."""

    @property
    def is_open(self) -> bool:
        """Whether the last span has no end yet."""
        return bool(self.spans) and self.spans[-1].end is None

    def begin(self, place: int) -> None:
        """Thinking begins, unless it has."""
        if not self.is_open:
            self.spans.append(ThinkingSpan(place))

    def begin_undecided(self, place: int) -> None:
        """Text begins that may turn out to be thinking, unless it has begun."""
        if self._undecided_begin is None:
            self._undecided_begin = place

    def restart(self, place: int) -> None:
        """A marker stood where the thinking might have gone on: what follows it is the thinking."""
        if self._undecided_begin is not None:
            self._undecided_begin = place
        elif self.is_open:
            self.spans[-1].begin = place

    def close(self, end: int, after: int) -> None:
        """The thinking ended, if it was one.

        Args:
            end: Before the marker that closed it.
            after: Behind that marker.
        """
        if self._undecided_begin is not None:
            self.spans.append(ThinkingSpan(self._undecided_begin))
            self._undecided_begin = None
        if self.is_open:
            span = self.spans[-1]
            span.end, span.after = max(end, span.begin), after
