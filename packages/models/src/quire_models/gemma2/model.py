"""Gemma 2 (Gemma Team 2024): norms before and after each part, soft caps, windows in every other layer."""

from __future__ import annotations

from collections.abc import Callable

from quire_models.gemma.model import embedding_factor
from quire_models.gemma2.config import Gemma2Config
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.norm import OffsetRMSNorm
from quire_models.layers.scope import Scope

__all__ = ["Gemma2ForCausalLM", "make_gemma2_layer", "sandwich_block"]


def sandwich_block(config: Gemma2Config, scope: Scope, attention: SelfAttention) -> SequentialBlock:
    """A layer around an attention of its own."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    return SequentialBlock(
        mixer=attention,
        input_norm=OffsetRMSNorm(scope / "input_layernorm", hidden, eps),
        attention_out_norm=OffsetRMSNorm(scope / "post_attention_layernorm", hidden, eps),
        feed_forward_norm=OffsetRMSNorm(scope / "pre_feedforward_layernorm", hidden, eps),
        feed_forward_out_norm=OffsetRMSNorm(scope / "post_feedforward_layernorm", hidden, eps),
        feed_forward=GatedMLP(scope / "mlp", hidden, config.intermediate_size, act=config.hidden_act),
    )


def make_gemma2_layer(config: Gemma2Config, layer: int, scope: Scope) -> SequentialBlock:
    """One layer; its window, if any, is the configuration's."""
    attention = SelfAttention(
        config,
        layer,
        scope / "self_attn",
        scale=config.query_pre_attn_scalar**-0.5,
        soft_cap=config.attention_soft_cap,
    )
    return sandwich_block(config, scope, attention)


class Gemma2ForCausalLM(DecoderLM):
    """The Gemma 2 network."""

    def __init__(
        self,
        config: Gemma2Config,
        scope: Scope,
        make_layer: Callable[..., SequentialBlock] = make_gemma2_layer,
    ) -> None:
        """Args:
        make_layer: (config, index of the layer, scope of the layer) -> the layer.
        """
        super().__init__(
            config,
            scope,
            make_layer,
            OffsetRMSNorm,
            embedding_factor=embedding_factor(config.hidden_size, scope.dtype),
            logits_soft_cap=config.logits_soft_cap,
        )
