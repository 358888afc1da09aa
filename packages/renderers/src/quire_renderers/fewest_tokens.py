"""A lower bound of the number of tokens of a text, from its letters: what is far too long need not be tokenized.

A token covers at most as many characters as the longest one of the vocabulary, unless it stands for what the vocabulary
does not know: only letters and digits are counted that it knows and that no normalizer joins or removes. Knows the
`tokenizers` library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import islice

import tokenizers
from tokenizers import models, pre_tokenizers

__all__ = ["FewestTokens"]

_NUM_BYTES = 256
_ALONE = re.compile(r"[^\W_\u1100-\u11ff\ua960-\ua97f\ud7b0-\ud7ff]")
"""Letters and digits, without those of Hangul that are joined to syllables."""
_NORMALIZERS = frozenset(("NFC", "NFD", "NFKC", "NFKD", "Precompiled", "Strip", "Lowercase", "Prepend"))
"""Types that keep the number of such letters, where they keep a letter that is alone. Others may drop some."""


class FewestTokens:
    """Bounds numbers of tokens from below.

    Args:
        backend: The tokenizer; read once.
        added_contents: Texts of all added tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer, added_contents: Iterable[str]) -> None:
        self._known: re.Pattern[str] | None = None
        self._longest = 0
        vocab = backend.get_vocab(with_added_tokens=False)
        # Bytes are at least as many as characters.
        self._longest = max(map(len, [*vocab, *added_contents]), default=0)
        normalizes = backend.normalizer is not None
        if normalizes and not set(_types(json.loads(backend.normalizer.__getstate__()))) <= _NORMALIZERS:
            return
        if _has_all_bytes(backend, vocab):
            self._known = _ALONE
        elif isinstance(backend.model, models.Unigram):
            letters = [each for each in vocab if len(each) == 1 and _ALONE.fullmatch(each)]
            known = [
                each for each in letters if not normalizes or backend.normalizer.normalize_str(each).strip() == each
            ]
            self._known = re.compile(f"[{re.escape(''.join(known))}]") if known else None

    def of(self, text: str, max_tokens: int) -> int:
        """A number of tokens that a text has at least; counting ends where it is more than `max_tokens`."""
        if self._known is None:
            return 0
        most = self._longest * (max_tokens + 1)
        if len(text) < most:
            return 0
        count = sum(1 for _ in islice(self._known.finditer(text), most))
        return -(-count // self._longest)


def _has_all_bytes(backend: tokenizers.Tokenizer, vocab: dict[str, int]) -> bool:
    """Whether a text becomes bytes, each of which is a token if need be."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    types = [] if backend.pre_tokenizer is None else _types(json.loads(backend.pre_tokenizer.__getstate__()))
    return (
        isinstance(backend.model, models.BPE)
        and "ByteLevel" in types
        and len(alphabet) == _NUM_BYTES
        and all(each in vocab for each in alphabet)
    )


def _types(state: object) -> list[str]:
    """Types of a normalizer or pre-tokenizer and of its parts, without those of sequences."""
    if not isinstance(state, dict):
        return []
    parts = [*state.get("normalizers", ()), *state.get("pretokenizers", ())]
    if parts:
        return [name for part in parts for name in _types(part)]
    return [str(state.get("type"))]
