"""How a tokenizer writes a pair of texts: the tokens around and between them, and where token types change."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from quire_interfaces import RenderedPrompt

__all__ = ["PairTemplate", "SupportsPairs"]


class PairTemplate(NamedTuple):
    """Tokens that a tokenizer puts around and between the two texts of a pair."""

    prefix: tuple[int, ...]
    middle: tuple[int, ...]
    suffix: tuple[int, ...]
    second_segment_start: int | None
    """Place of the first token with token type 1, counted in the tokens of `middle` behind the first text; None where
    all tokens have type 0."""

    def join(self, first: list[int], second: list[int]) -> RenderedPrompt:
        """The pair as one prompt."""
        start = 0
        if self.second_segment_start is not None:
            start = len(self.prefix) + len(first) + self.second_segment_start
        token_ids = [*self.prefix, *first, *self.middle, *second, *self.suffix]
        return RenderedPrompt(token_ids=token_ids, second_segment_start=start)

    @property
    def num_tokens(self) -> int:
        return len(self.prefix) + len(self.middle) + len(self.suffix)


@runtime_checkable
class SupportsPairs(Protocol):
    """A tokenizer that knows how a pair of texts is written."""

    @property
    def pair_template(self) -> PairTemplate | None:
        """None where its post-processor takes no pairs."""
