"""Attention backends and their metadata."""

from quire_attention.batch import AttentionMetadata, ForwardBatch

__version__ = "0.1.0"

__all__ = ["AttentionMetadata", "ForwardBatch"]
