"""Attention backends, attention layers, and the inputs of a forward pass."""

from quire_attention.backend import AttentionBackend, AttentionChoice, attention_backend_names, select_attention_backend
from quire_attention.batch import CrossMedia, EncoderBatch, ForwardBatch, MediaEmbeds
from quire_attention.layer import Attention

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "AttentionBackend",
    "AttentionChoice",
    "CrossMedia",
    "EncoderBatch",
    "ForwardBatch",
    "MediaEmbeds",
    "attention_backend_names",
    "select_attention_backend",
]
