"""OLMo (Groeneveld et al. 2024): Llama with layer norms that have no weights, and bounded projections."""

from __future__ import annotations

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.layers.attention import SelfAttention
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.norm import LayerNorm
from quire_models.layers.scope import Scope
from quire_models.olmo.config import OlmoConfig

__all__ = ["OlmoForCausalLM"]


def make_norm(scope: Scope, size: int, eps: float) -> LayerNorm:
    """A layer norm without weights."""
    return LayerNorm(scope, size, eps, weight=False, bias=False)


class OlmoLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: OlmoConfig, layer: int, scope: Scope) -> None:
        self.norm = make_norm(scope / "norm", config.hidden_size, config.rms_norm_eps)
        self.attention = SelfAttention(config, layer, scope / "self_attn", clip=config.clip_qkv)
        self.mlp = GatedMLP(scope / "mlp", config.hidden_size, config.intermediate_size, act=config.hidden_act)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        x = x + self.attention(self.norm(x), cos, sin, batch)
        return x + self.mlp(self.norm(x))


class OlmoForCausalLM(DecoderLM):
    """The OLMo network."""

    def __init__(self, config: OlmoConfig, scope: Scope) -> None:
        super().__init__(config, scope, OlmoLayer, make_norm)
