"""Granite 3 (IBM 2024): Llama with constant factors for embedding, scores, residuals and logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire_models.granite.config import GraniteConfig
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import SequentialBlock, pre_norm_block
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.norm import RMSNorm
from quire_models.layers.scope import Scope

if TYPE_CHECKING:
    from quire_models.granitemoe.config import GraniteMoEConfig

__all__ = ["GraniteForCausalLM"]


def make_layer(config: GraniteConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One decoder layer."""
    attention = SelfAttention(config, layer, scope / "self_attn", scale=config.attention_multiplier)
    return pre_norm_block(config, scope, attention, residual_factor=config.residual_multiplier)


class GraniteForCausalLM(DecoderLM):
    """The Granite network."""

    config: GraniteConfig | GraniteMoEConfig

    def __init__(
        self,
        config: GraniteConfig | GraniteMoEConfig,
        scope: Scope,
        make_layer: Callable[[Any, int, Scope], SequentialBlock] = make_layer,
    ) -> None:
        super().__init__(
            config,
            scope,
            make_layer,
            RMSNorm,
            embedding_factor=config.embedding_multiplier,
            logits_factor=1.0 / config.logits_scaling,
        )
