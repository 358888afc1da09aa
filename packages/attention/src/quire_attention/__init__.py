"""Attention backends and their metadata."""

from quire_attention.backend import AttentionAbilities, AttentionBackend, AttentionRequest, OpsAttentionBackend
from quire_attention.batch import AttentionMetadata, EncoderBatch, ForwardBatch, MediaEmbeds
from quire_attention.layer import Attention
from quire_attention.selection import AttentionChoice, attention_backend_names, select_attention_backend

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "AttentionAbilities",
    "AttentionBackend",
    "AttentionChoice",
    "AttentionMetadata",
    "AttentionRequest",
    "EncoderBatch",
    "ForwardBatch",
    "MediaEmbeds",
    "OpsAttentionBackend",
    "attention_backend_names",
    "select_attention_backend",
]
