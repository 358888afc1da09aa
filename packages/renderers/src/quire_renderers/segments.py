"""Where a text may be cut so that its parts can be tokenized apart.

An added token that is matched before normalization (`<|im_end|>`) splits the text: `tokenizers` normalizes,
pre-tokenizes and merges what lies between two such tokens on its own. Cutting *before* an added token and leaving it
at the head of the next part also keeps rules right that look at the start of the text (a metaspace that is prepended
to the first word only). This module finds the cuts and says for which tokenizers there are none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from itertools import pairwise
from typing import Protocol, runtime_checkable

from quire_renderers.tokenizer_files import AddedTokenSpec

__all__ = ["SegmentBorders", "SupportsLiteralText", "SupportsSegments", "any_of"]


class SegmentBorders:
    """Cuts a text before each added token.

    Args:
        added_tokens: Every added token of the tokenizer.
    """

    def __init__(self, added_tokens: Iterable[AddedTokenSpec]) -> None:
        # Normalized ones are looked for later, inside what the others left over, so they cut nothing here.
        matched_first = [token for token in added_tokens if not token.normalized and token.content]
        # A token that takes in blanks to its left belongs to the part before it: no cut there.
        self._uncut = frozenset(token.content for token in matched_first if token.lstrip)
        self._pattern = any_of(token.content for token in matched_first) if _safe(matched_first) else None

    @property
    def exist(self) -> bool:
        """Whether texts of this tokenizer can be cut at all."""
        return self._pattern is not None

    def split(self, text: str) -> list[str]:
        """Parts whose tokens, one after another, are the tokens of `text`."""
        if self._pattern is None:
            return [text] if text else []
        matches = self._pattern.finditer(text)
        starts = [match.start() for match in matches if match.group() not in self._uncut]
        return [text[start:end] for start, end in pairwise([0, *starts, len(text)]) if end > start]

    def leading(self, part: str) -> str | None:
        """The added token a part begins with, if it does."""
        match = None if self._pattern is None else self._pattern.match(part)
        return None if match is None else match.group()


def _safe(tokens: list[AddedTokenSpec]) -> bool:
    if not tokens or any(token.single_word for token in tokens):
        return False
    # A token that takes in blanks to its right could swallow the beginning of one that starts with a blank.
    takes_blanks = any(token.rstrip for token in tokens)
    return not (takes_blanks and any(token.content[0].isspace() for token in tokens))


def any_of(contents: Iterable[str]) -> re.Pattern[str]:
    """Leftmost, then longest: what the Aho-Corasick automaton of `tokenizers` matches."""
    ordered = sorted(set(contents), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or "(?!)")


@runtime_checkable
class SupportsSegments(Protocol):
    """A tokenizer whose texts can be cut."""

    borders: SegmentBorders

    def encode_segment(self, text: str) -> list[int]:
        """Token ids of one part (no special tokens added), as it stands at its place in the whole text."""

    def wrap_special_tokens(self, token_ids: list[int]) -> list[int]:
        """The ids with the tokens that `add_special_tokens` puts around a text."""


@runtime_checkable
class SupportsLiteralText(Protocol):
    """A tokenizer that can leave control tokens in a text unread."""

    @property
    def matched_tokens(self) -> list[AddedTokenSpec]:
        """All tokens that are matched where a text holds their content."""

    def literal_normalizer(self, control_tokens: Collection[str]) -> Callable[[str], str] | None:
        """What is done to texts before some of the control tokens are looked for; None for nothing that matters."""

    def literal_encoder(self, control_tokens: Collection[str], mark: str) -> Callable[[str], list[int]]:
        """Encodes parts of texts in which control tokens that the mark breaks are ordinary text; others are matched.

        The marks leave nothing behind, and no special tokens are put around.
        """
