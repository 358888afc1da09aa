"""Tokenizing texts in which what looks like a control token is ordinary text.

Control tokens that come from a message are broken by a mark (control_tokens.py); those that the chat template wrote are
whole. The tokenizer of this module knows the whole ones under names that no text holds, so that the broken ones, put
together again, are text to it like any other.

Knows the `tokenizers` library; knows no messages.
"""

from __future__ import annotations

import random
from collections.abc import Collection

import tokenizers

from quire_renderers.segments import any_of

__all__ = ["LiteralEncoder", "unguessable"]

_random = random.SystemRandom()


def unguessable(first: int, last: int) -> str:
    """Characters between two code points that no text holds: nobody can guess them."""
    return "".join(chr(_random.randint(first, last)) for _ in range(10))


class LiteralEncoder:
    """A second tokenizer over the model of a first one; the vocabulary is there once. Thread-safe.

    Args:
        backend: The first one.
        control_tokens: Texts of its added tokens that are ordinary text where they are broken.
        mark: What breaks them.
    """

    def __init__(self, backend: tokenizers.Tokenizer, control_tokens: Collection[str], mark: str) -> None:
        self._mark = mark
        self._pattern = any_of(control_tokens)
        self._backend = tokenizers.Tokenizer(backend.model)
        self._backend.encode_special_tokens = backend.encode_special_tokens
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(backend, part) is not None:
                setattr(self._backend, part, getattr(backend, part))
        key = unguessable(0xFDE0, 0xFDEF)  # noncharacters of Unicode, like the mark, but others
        self._names = {text: f"{key}{place}{key}" for place, text in enumerate(control_tokens)}
        self._ids = self._add_tokens(backend)
        self._cut = f"{key}-{key}"
        self._backend.add_tokens([tokenizers.AddedToken(self._cut, normalized=False)])
        self._cut_id = self._backend.token_to_id(self._cut)
        unknown = getattr(backend.model, "unk_token", None)
        # What the model knows nothing of is not taken from a message.
        self._control_ids = {backend.token_to_id(text) for text in control_tokens if text != unknown}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text with marks, which leave nothing behind; no special tokens are put around it."""
        named = self._pattern.sub(lambda match: self._names[match.group()], text)
        ids = self._encode(named.replace(self._mark, ""))
        if not self._control_ids.isdisjoint(ids):
            # The model has some among its own pieces: they are kept apart, at the price of other pieces around them.
            ids = self._encode(named.replace(self._mark, self._cut))
        return [self._ids.get(token_id, token_id) for token_id in ids if token_id != self._cut_id]

    def _add_tokens(self, backend: tokenizers.Tokenizer) -> dict[int, int]:
        """Id here -> id there, where they differ."""
        ids: dict[int, int] = {}
        for token_id, token in sorted(backend.get_added_tokens_decoder().items()):
            name = self._names.get(token.content)
            own = tokenizers.AddedToken(
                name or token.content,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                single_word=token.single_word,
                normalized=token.normalized and name is None,
                special=token.special,
            )
            (self._backend.add_special_tokens if token.special else self._backend.add_tokens)([own])
            here = self._backend.token_to_id(own.content)
            assert here is not None
            ids[here] = token_id
        return {own_id: token_id for own_id, token_id in ids.items() if own_id != token_id}

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids
