"""Granite 4 (IBM 2025): Granite's factors around Mamba-2 in most layers, attention in some, experts in all or none."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from quire_models.granitemoe.model import make_moe
from quire_models.granitemoehybrid.config import GraniteHybridConfig
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import Mixer, SequentialBlock, pre_norm_block
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.fused import split_rows
from quire_models.layers.mamba2 import Mamba2Mixer
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.moe import SparseMoE
from quire_models.layers.norm import RMSNorm
from quire_models.layers.scope import Scope

__all__ = ["GraniteMoeHybridForCausalLM"]


def make_layer(config: GraniteHybridConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One layer, with attention or Mamba-2, with experts or without."""
    shared = scope / "shared_mlp"
    mixer: Mixer
    if config.attention_layers[layer]:
        inner, rotated = scope / "self_attn", config.rotary_dim > 0
        mixer = SelfAttention(config, layer, inner, scale=config.attention_multiplier, rotated=rotated)
    else:
        mixer = Mamba2Mixer(scope / "mamba", config.mixer, layer)
    feed_forward: SparseMoE | GatedMLP
    if config.num_experts:
        feed_forward = make_moe(config, scope / "block_sparse_moe", shared)
    else:
        feed_forward = GatedMLP(shared, config.hidden_size, config.shared_intermediate_size, act=config.hidden_act)
    return pre_norm_block(config, scope, mixer, feed_forward, residual_factor=config.residual_multiplier)


class GraniteMoeHybridForCausalLM(DecoderLM):
    """The Granite 4 network."""

    config: GraniteHybridConfig

    def __init__(self, config: GraniteHybridConfig, scope: Scope) -> None:
        super().__init__(
            config,
            scope,
            make_layer,
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
