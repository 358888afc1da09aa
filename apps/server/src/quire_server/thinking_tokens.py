"""Which tokens of an output are thinking: the parser tells the characters, the engine where each token's text begins.

Knows no marker and no protocol.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from quire_renderers import OutputParser, ThinkingSpan

__all__ = ["ThinkingTokens"]


class ThinkingTokens:
    """Counts the tokens of one output as they come; a token with a part of the thinking's text is one of them.

    Args:
        parser: Is fed the text of the output by the caller, before the tokens are added here.
    """

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self.offsets: list[int] = []
        """Per token: where its text begins in the output."""
        self.num_chars = 0
        """Length of the text so far."""
        self._num_hidden = 0

    def add(self, offsets: Sequence[int], num_chars: int) -> None:
        """More tokens, which brought so many characters."""
        self.offsets += offsets
        self.num_chars += num_chars

    def end(self, *, by_token: bool) -> None:
        """The output is over, which the parser has not heard: half a closing marker at its end is no thinking; nor is,
        with `by_token`, the token that ended it."""
        is_read = self._parser.num_read == self.num_chars
        self._num_hidden = int(by_token) if is_read else len(self.offsets) - self.settled()

    def first(self, span: ThinkingSpan) -> int:
        """Index of the first token of a span; as many as there are tokens when it has not come."""
        place = bisect_left(self.offsets, span.begin)
        next_begin = self.offsets[place] if place < len(self.offsets) else self.num_chars
        reaches_in = place > 0 and self.offsets[place - 1] < span.begin < next_begin
        return place - 1 if reaches_in else place

    def behind(self, span: ThinkingSpan) -> int:
        """Index behind the last token of a closed span."""
        assert span.end is not None
        place = bisect_right(self.offsets, span.end) - 1
        return place if place >= 0 and self.offsets[place] == span.end else place + 1

    def settled(self) -> int:
        """How many tokens are read for good: what may still become a marker is not."""
        return bisect_left(self.offsets, self._parser.num_read)

    def num_past_thinking(self) -> int:
        """Tokens up to the last that belongs to a thinking or its markers."""
        spans = self._parser.thinking_spans
        if not spans:
            return 0
        after = spans[-1].after
        return len(self.offsets) if after is None else bisect_left(self.offsets, after)

    def count(self, *, is_over: bool = False) -> int:
        """Tokens of thinking so far.

        Args:
            is_over: No more will come: what is open ends with the output.
        """
        total = 0
        for span in self._parser.thinking_spans:
            if span.end is not None:
                behind = self.behind(span)
            else:
                behind = len(self.offsets) - self._num_hidden if is_over else self.settled()
            total += max(0, behind - self.first(span))
        return total
