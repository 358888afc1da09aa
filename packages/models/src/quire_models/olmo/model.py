"""OLMo (Groeneveld et al. 2024): Llama with layer norms that have no weights, and bounded projections."""

from __future__ import annotations

from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.norm import LayerNorm
from quire_models.layers.scope import Scope
from quire_models.olmo.config import OlmoConfig

__all__ = ["OlmoForCausalLM"]


def make_norm(scope: Scope, size: int, eps: float) -> LayerNorm:
    """A layer norm without weights."""
    return LayerNorm(scope, size, eps, weight=False, bias=False)


def make_layer(config: OlmoConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One layer."""
    norm = make_norm(scope / "norm", config.hidden_size, config.rms_norm_eps)
    return SequentialBlock(
        input_norm=norm,
        mixer=SelfAttention(config, layer, scope / "self_attn", clip=config.clip_qkv),
        feed_forward_norm=norm,
        feed_forward=GatedMLP(scope / "mlp", config.hidden_size, config.intermediate_size, act=config.hidden_act),
    )


class OlmoForCausalLM(DecoderLM):
    """The OLMo network."""

    def __init__(self, config: OlmoConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_layer, make_norm)
