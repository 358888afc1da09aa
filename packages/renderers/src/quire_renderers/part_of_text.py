"""The first or the last tokens of a long text, without tokenizing all of it.

A text may be cut at a blank between two letters where its tokenizer splits there before it looks for tokens: what is on
one side is then tokenized alike with and without the other side. Knows the `tokenizers` library; knows no lengths of
models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

import tokenizers

__all__ = ["PartOfText", "SupportsParts"]

CHARS_PER_TOKEN = 6
"""Characters of a text that are read first, per token that is wanted: English has 4 to 5."""
MIN_CHARS = 256
FARTHEST_CUT = 2000
"""Characters in which a place to cut is looked for."""

_BORDER = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")
"""A blank between two letters. None of them changes with what is beyond it under any Unicode normalization, and no
pattern of a pre-tokenizer looks across it, as the sample says."""
_SAMPLE = "ab cd Ef gh"


@runtime_checkable
class SupportsParts(Protocol):
    """A tokenizer that finds tokens at an end of a text."""

    @property
    def part_of_text(self) -> PartOfText: ...


class PartOfText:
    """Finds tokens at an end of a text.

    Args:
        backend: Whose normalizer and pre-tokenizer are asked whether texts can be cut.
        encode: Token ids of a whole text.
        added_contents: Texts of all added tokens.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, encode: Callable[[str], list[int]], added_contents: Iterable[str]
    ) -> None:
        self._encode = encode
        self._can_cut = _splits_words(backend) and not any(_BORDER.search(content) for content in added_contents)

    def first(self, text: str, max_tokens: int) -> list[int]:
        """The first `max_tokens` token ids of a text, or all that there are."""
        size = max(MIN_CHARS, CHARS_PER_TOKEN * max_tokens)
        while self._can_cut and size < len(text):
            cut = _last_border(text, max(0, size - FARTHEST_CUT), size)
            if cut is not None:
                token_ids = self._encode(text[:cut])
                if len(token_ids) >= max_tokens:
                    return token_ids[:max_tokens]
            size *= 2
        return self._encode(text)[:max_tokens]

    def last(self, text: str, max_tokens: int) -> list[int]:
        """The last `max_tokens` token ids of a text, or all that there are."""
        size = max(MIN_CHARS, CHARS_PER_TOKEN * max_tokens)
        while self._can_cut and size < len(text):
            match = _BORDER.search(text, len(text) - size, len(text) - size + FARTHEST_CUT)
            follower = None if match is None else _BORDER.search(text, match.end(), match.end() + FARTHEST_CUT)
            if match is not None and follower is not None:
                token_ids = self._encode(text[match.start() :])
                # A text may begin otherwise than it goes on: what is before the second border is not taken.
                if len(token_ids) - len(self._encode(text[match.start() : follower.start()])) >= max_tokens:
                    return token_ids[len(token_ids) - max_tokens :]
            size *= 2
        token_ids = self._encode(text)
        return token_ids[max(0, len(token_ids) - max_tokens) :]


def _last_border(text: str, begin: int, end: int) -> int | None:
    """Place of the last blank between two letters in a part of a text."""
    cut = end
    while (cut := text.rfind(" ", begin, cut)) > begin:
        if _BORDER.match(text, cut):
            return cut
    return None


def _splits_words(backend: tokenizers.Tokenizer) -> bool:
    """Whether words are apart before the model looks for tokens in them."""
    if backend.pre_tokenizer is None:
        return False
    sample = _SAMPLE if backend.normalizer is None else backend.normalizer.normalize_str(_SAMPLE)
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(sample)]
    letters = ["".join(char for char in piece if char.isascii() and char.isalpha()).lower() for piece in pieces]
    return [each for each in letters if each] == _SAMPLE.lower().split()
