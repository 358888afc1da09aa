"""How texts are put to a model of late interaction (ColBERT): markers, lengths, query expansion. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire_interfaces import CheckpointError, Tokenizer
from quire_pooling.spec import LateInteractionSpec

__all__ = ["LateInteractionTexts", "LateInteractionTokens", "document_tokens", "query_tokens"]


class LateInteractionTokens(NamedTuple):
    """A text as the network reads it."""

    token_ids: list[int]
    num_attended: int
    """Tokens from the first on that others attend to; those behind are of an expansion that they do not see."""


def query_tokens(
    spec: LateInteractionSpec, token_ids: Sequence[int], *, prefix_id: int | None, mask_id: int | None
) -> LateInteractionTokens:
    """A query with its marker and its expansion (arXiv 2004.12832, section 3.2).

    Args:
        spec: What the checkpoint says.
        token_ids: Of the query, with special tokens, at most `query_length` with the marker.
        prefix_id: The marker's; None for none.
        mask_id: The tokenizer's mask token, or its end of a text where it has none; None where nothing is filled up.
    """
    ids = _marked(token_ids, prefix_id)
    num_tokens = len(ids)
    if spec.do_query_expansion and mask_id is not None:
        ids += [mask_id] * ((spec.query_length or 0) - num_tokens)
    return LateInteractionTokens(ids, len(ids) if spec.attend_to_expansion_tokens else num_tokens)


def document_tokens(token_ids: Sequence[int], *, prefix_id: int | None) -> LateInteractionTokens:
    """A document with its marker.

    Args:
        token_ids: Of the document, with special tokens, at most `document_length` with the marker.
        prefix_id: The marker's; None for none.
    """
    ids = _marked(token_ids, prefix_id)
    return LateInteractionTokens(ids, len(ids))


def _marked(token_ids: Sequence[int], prefix_id: int | None) -> list[int]:
    """The marker stands behind the first token."""
    return [*token_ids[:1], *([] if prefix_id is None else [prefix_id]), *token_ids[1:]]


class LateInteractionTexts:
    """What a tokenizer makes of the texts of a model of late interaction."""

    def __init__(self, spec: LateInteractionSpec, tokenizer: Tokenizer) -> None:
        """Args:
        spec: What the checkpoint says.
        tokenizer: The model's.

        Raises:
            CheckpointError: A marker is no token of the tokenizer.
        """
        self._spec = spec
        words = {spec.query_prefix, spec.document_prefix, spec.expansion_token, *spec.skiplist_words} - {""}
        self._ids = {
            token: token_id
            for token_id in range(tokenizer.vocab_size)
            if (token := tokenizer.id_to_token(token_id)) in words
        }
        for prefix in (spec.query_prefix, spec.document_prefix):
            if prefix and prefix not in self._ids:
                raise CheckpointError(
                    f"config_sentence_transformers.json: texts are marked by {prefix!r}, which is no token of the "
                    "tokenizer; download the tokenizer again"
                )
        self.query_suffix = spec.query_suffix
        """Text behind a query."""
        self.skip_token_ids = tuple(sorted(self._ids[word] for word in spec.skiplist_words if word in self._ids))
        """Tokens of documents whose vectors are left out."""

    def max_tokens(self, *, is_query: bool) -> int | None:
        """Tokens that are read of a text, without its marker; None for as many as the network takes."""
        spec = self._spec
        length = spec.query_length if is_query else spec.document_length
        return None if length is None else length - bool(spec.query_prefix if is_query else spec.document_prefix)

    def mark(self, token_ids: Sequence[int], *, is_query: bool) -> LateInteractionTokens:
        """A text as the network reads it: with its marker, a query with its expansion.

        Args:
            token_ids: Of the text, with special tokens, at most `max_tokens`.
            is_query: Whether it is a query, or else a document.
        """
        spec = self._spec
        if not is_query:
            return document_tokens(token_ids, prefix_id=self._ids.get(spec.document_prefix))
        return query_tokens(
            spec, token_ids, prefix_id=self._ids.get(spec.query_prefix), mask_id=self._ids.get(spec.expansion_token)
        )
