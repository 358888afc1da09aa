"""Gemma (Gemma Team 2024): Llama with a scaled embedding, a GELU gate, and norm weights stored less one."""

from __future__ import annotations

import torch

from quire_models.config import ModelConfig
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.norm import OffsetRMSNorm
from quire_models.layers.scope import Scope

__all__ = ["GemmaForCausalLM", "embedding_factor"]


def make_layer(config: ModelConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One layer."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    return SequentialBlock(
        input_norm=OffsetRMSNorm(scope / "input_layernorm", hidden, eps),
        mixer=SelfAttention(config, layer, scope / "self_attn"),
        feed_forward_norm=OffsetRMSNorm(scope / "post_attention_layernorm", hidden, eps),
        feed_forward=GatedMLP(scope / "mlp", hidden, config.intermediate_size, act=config.hidden_act),
    )


def embedding_factor(hidden_size: int, dtype: torch.dtype) -> float:
    """The root of the hidden size, rounded to the network's dtype."""
    return float(torch.tensor(hidden_size**0.5, dtype=dtype))


class GemmaForCausalLM(DecoderLM):
    """The Gemma network."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        factor = embedding_factor(config.hidden_size, scope.dtype)
        super().__init__(config, scope, make_layer, OffsetRMSNorm, embedding_factor=factor)
