"""Words without an end in sight, where a text is cut: what of them decides the tokens on one side.

- A model of whole words (WordPiece) makes one unknown token of a word longer than its limit, whatever is in its middle,
  which can be left out.
- What no merge joins (BPE; Sennrich et al. 2016, arXiv:1508.07909) is merged by itself, in the same order: tokens on
  one side of a border between two tokens are those of that side alone. Of the likeliest tokens (Unigram; Kudo 2018,
  arXiv:1804.10959) those before a border are the likeliest of that side. A token has at most L characters, so one of L
  places in a row is such a border, whatever lies beyond. Where all L sides have the same tokens, so has the text.

Knows the `tokenizers` library; encodes nothing itself.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable

import tokenizers
from tokenizers import models

__all__ = ["EndlessWords"]

_ALPHABETS = (string.digits + string.ascii_letters, string.ascii_letters, string.ascii_lowercase)
_LONGEST = 100
"""Characters of a token, beyond which there are too many places."""


class EndlessWords:
    """Runs of letters that a tokenizer leaves in one piece.

    Args:
        backend: The tokenizer; read once.
        added_contents: Texts of all added tokens, none of which may be in a run.
    """

    def __init__(self, backend: tokenizers.Tokenizer, added_contents: Iterable[str]) -> None:
        self._limit, self._num_places = 0, 0
        self._inside: re.Pattern[str] | None = None
        self._is_symmetric = False
        contents = list(added_contents)
        for alphabet in _ALPHABETS:
            sample = alphabet[::-1] + alphabet * 10
            pieces = _pieces(backend, sample)
            if len(pieces) != 1 or any(content and set(content) <= set(alphabet) for content in contents):
                continue
            model, is_as_written = backend.model, len(pieces[0]) == len(sample)
            if isinstance(model, models.WordPiece) and is_as_written:
                self._limit = model.max_input_chars_per_word
                self._inside = re.compile(f"[{alphabet}]{{{self._limit + 3},}}")
            elif _has_borders(model):
                longest = max((len(token) for token in backend.get_vocab() if set(token) & set(alphabet)), default=0)
                if 0 < longest <= _LONGEST:
                    self._num_places = longest
                    self._inside = re.compile(f"[{alphabet}]{{{longest + 2}}}")
                    self._is_symmetric = is_as_written and isinstance(model, models.BPE)
            break

    def squeezed(self, text: str) -> str:
        """The text, or a shorter one of the same tokens."""
        if not self._limit or self._inside is None or len(text) <= 2 * self._limit:
            return text
        kept = self._limit // 2 + 1
        return self._inside.sub(lambda match: match[0][:kept] + match[0][-kept:], text)

    def ends(self, text: str, end: int) -> range:
        """Places up to `end`, one of which is a border between tokens of any text that begins with text[:end + 1]; none
        where that is not known."""
        begin = end - self._num_places
        return range(begin + 1, end + 1) if self._is_inside(text, begin - 1) else range(0)

    def begins(self, text: str, begin: int) -> range:
        """Places from `begin` on, one of which is a border between tokens of any text that ends with text[begin - 1:];
        none where that is not known."""
        is_known = self._is_symmetric and self._is_inside(text, begin - 1)
        return range(begin, begin + self._num_places) if is_known else range(0)

    def is_worth_it(self, size: int, text: str) -> bool:
        """Whether reading `size` characters once for each place costs less than reading the text."""
        return 0 < self._num_places * size < len(text)

    def _is_inside(self, text: str, begin: int) -> bool:
        """Whether all places and one character on either side are inside of one run."""
        return (
            self._num_places > 0 and self._inside is not None and begin >= 0 and bool(self._inside.match(text, begin))
        )


def _has_borders(model: models.Model) -> bool:
    """Whether tokens before a border do not depend on what is behind it."""
    if isinstance(model, models.BPE):
        return not (model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix)
    return isinstance(model, models.Unigram)


def _pieces(backend: tokenizers.Tokenizer, text: str) -> list[str]:
    """What the model looks for tokens in."""
    text = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    if backend.pre_tokenizer is None:
        return [text]
    return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
