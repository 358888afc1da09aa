"""Bamba (IBM, Princeton, CMU, UIUC 2024): Mamba-2 in most layers, attention in some."""

from __future__ import annotations

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.layers.attention import SelfAttention
from quire_models.layers.mamba2 import Mamba2Mixer
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.norm import RMSNorm
from quire_models.layers.recurrent_lm import RecurrentLM
from quire_models.layers.scope import Scope
from quire_models.recurrent_config import HybridConfig

__all__ = ["BambaForCausalLM"]


class BambaLayer:
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: HybridConfig, layer: int, scope: Scope) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(scope / "input_layernorm", hidden, eps)
        self.attention: SelfAttention | None = None
        if config.attention_layers[layer]:
            self.attention = SelfAttention(config, layer, scope / "self_attn")
        else:
            self.mamba = Mamba2Mixer(scope / "mamba", config.mixer, layer)
        self.mlp_norm = RMSNorm(scope / "pre_ff_layernorm", hidden, eps)
        self.mlp = GatedMLP(
            scope / "feed_forward", hidden, config.intermediate_size, act=config.hidden_act, bias=config.mlp_bias
        )

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        normed = self.input_norm(x)
        mixed = self.mamba(normed, batch) if self.attention is None else self.attention(normed, cos, sin, batch)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x))


class BambaForCausalLM(RecurrentLM):
    """The Bamba network."""

    def __init__(self, config: HybridConfig, scope: Scope) -> None:
        super().__init__(config, scope, BambaLayer, RMSNorm, norm="final_layernorm")
