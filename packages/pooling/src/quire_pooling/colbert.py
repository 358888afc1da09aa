"""Checkpoints in the format of ColBERT's own code (arXiv 2004.12832): how texts are put to them, as artifact.metadata
says. Free of torch.
"""

from __future__ import annotations

import dataclasses
import string
from pathlib import Path

from quire_interfaces import CheckpointError, Fields, read_json
from quire_pooling.checkpoint import special_token
from quire_pooling.spec import LateInteractionSpec, PoolerSpec

__all__ = ["colbert_metadata", "with_colbert_texts"]


def colbert_metadata(folder: Path) -> Fields:
    """artifact.metadata of a checkpoint; empty where it is not there."""
    path = folder / "artifact.metadata"
    return Fields(read_json(path) if path.is_file() else {}, str(path))


def with_colbert_texts(pooler: PoolerSpec, folder: Path) -> PoolerSpec:
    """A pooler of vectors per token with the markers, lengths and punctuation of ColBERT (section 3.2 and 3.3).

    Args:
        pooler: Of the network.
        folder: The checkpoint, with artifact.metadata, in whose absence ColBERT's own defaults hold, and
            tokenizer_config.json.

    Raises:
        CheckpointError: A file cannot be understood, or vectors are compared in another way than by cosines.
    """
    settings = colbert_metadata(folder)
    if (similarity := settings.text("similarity", default="cosine")) != "cosine":
        raise CheckpointError(f"{settings.source}: similarity {similarity!r} is not supported; supported: cosine")
    texts = LateInteractionSpec(
        query_prefix=settings.text("query_token_id", default="[unused0]"),
        document_prefix=settings.text("doc_token_id", default="[unused1]"),
        query_length=settings.integer("query_maxlen", default=32, minimum=1),
        document_length=settings.integer("doc_maxlen", default=220, minimum=1),
        do_query_expansion=True,
        expansion_token=special_token(folder / "tokenizer_config.json", "mask_token"),
        attend_to_expansion_tokens=settings.flag("attend_to_mask_tokens", default=False),
        skiplist_words=tuple(string.punctuation) if settings.flag("mask_punctuation", default=True) else (),
    )
    return dataclasses.replace(pooler, late_interaction=texts, normalize=True)
