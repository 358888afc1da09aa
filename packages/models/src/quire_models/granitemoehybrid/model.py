"""Granite 4 (IBM 2025): Granite's factors around Mamba-2 in most layers, attention in some, experts in all or none."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.granitemoe.model import make_moe
from quire_models.granitemoehybrid.config import GraniteHybridConfig
from quire_models.layers.attention import SelfAttention
from quire_models.layers.fused import split_rows
from quire_models.layers.mamba2 import Mamba2Mixer
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.moe import SparseMoE
from quire_models.layers.norm import RMSNorm
from quire_models.layers.recurrent_lm import RecurrentLM
from quire_models.layers.scope import Scope

__all__ = ["GraniteMoeHybridForCausalLM"]


class GraniteHybridLayer:
    """x + c * mixer(norm(x)), then x + c * mlp(norm(x))."""

    def __init__(self, config: GraniteHybridConfig, layer: int, scope: Scope) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(scope / "input_layernorm", hidden, eps)
        self.attention: SelfAttention | None = None
        if config.attention_layers[layer]:
            self.attention = SelfAttention(
                config,
                layer,
                scope / "self_attn",
                scale=config.attention_multiplier,
                rotated=config.rotary_dim > 0,
            )
        else:
            self.mamba = Mamba2Mixer(scope / "mamba", config.mixer, layer)
        self.mlp_norm = RMSNorm(scope / "post_attention_layernorm", hidden, eps)
        self.mlp: SparseMoE | GatedMLP
        if config.num_experts:
            self.mlp = make_moe(config, scope / "block_sparse_moe", scope / "shared_mlp")
        else:
            self.mlp = GatedMLP(scope / "shared_mlp", hidden, config.shared_intermediate_size, act=config.hidden_act)
        self.factor = config.residual_multiplier

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        normed = self.input_norm(x)
        mixed = self.mamba(normed, batch) if self.attention is None else self.attention(normed, cos, sin, batch)
        x = x + mixed * self.factor
        return x + self.mlp(self.mlp_norm(x)) * self.factor


class GraniteMoeHybridForCausalLM(RecurrentLM):
    """The Granite 4 network."""

    config: GraniteHybridConfig

    def __init__(self, config: GraniteHybridConfig, scope: Scope) -> None:
        super().__init__(
            config,
            scope,
            GraniteHybridLayer,
            RMSNorm,
            embedding_factor=config.embedding_multiplier,
            logits_factor=1.0 / config.logits_scaling,
        )

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Takes gate and up of the shared network apart."""
        if ".shared_mlp." not in name:
            return ((name, tensor),)
        inner = self.config.shared_intermediate_size
        name = name.replace("output_linear", "down_proj")
        return split_rows(name, tensor, {"input_linear": {"gate_proj": inner, "up_proj": inner}})
