"""How texts are put to a model of late interaction (ColBERT): markers, lengths, query expansion. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire_pooling.spec import LateInteractionSpec

__all__ = ["LateInteractionTokens", "document_tokens", "query_tokens"]


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
