"""Qwen3-Next (Qwen team 2025): gated delta nets, gated attention in every fourth layer, experts."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from quire_models.delta_config import GatedDeltaConfig
from quire_models.layers.blocks import Mixer, SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.gated_attention import GatedAttention
from quire_models.layers.gated_delta import GatedDeltaNet
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.moe import SparseMoE
from quire_models.layers.norm import OffsetRMSNorm
from quire_models.layers.scope import Scope
from quire_models.qwen2_moe.model import make_moe
from quire_models.qwen3_next.config import Qwen3NextConfig

__all__ = ["Qwen3NextForCausalLM", "delta_layer"]


def delta_layer(
    config: GatedDeltaConfig,
    layer: int,
    scope: Scope,
    *,
    feed_forward: SparseMoE | None = None,
    by_key_head: bool = False,
) -> SequentialBlock:
    """One layer, with a gated delta net or gated attention.

    Args:
        feed_forward: Experts; None for a gated feed-forward network of the configuration's size.
        by_key_head: As `GatedDeltaNet` takes it.
    """
    hidden, eps = config.hidden_size, config.rms_norm_eps
    cache = config.cache_index(f"model.layers.{layer}")
    mixer: Mixer
    if config.attention_layers[layer]:
        mixer = GatedAttention(config, scope / "self_attn", cache)
    else:
        mixer = GatedDeltaNet(scope / "linear_attn", config.delta, cache, by_key_head=by_key_head)
    return SequentialBlock(
        input_norm=OffsetRMSNorm(scope / "input_layernorm", hidden, eps),
        mixer=mixer,
        feed_forward_norm=OffsetRMSNorm(scope / "post_attention_layernorm", hidden, eps),
        feed_forward=feed_forward or GatedMLP(scope / "mlp", hidden, config.intermediate_size, act=config.hidden_act),
    )


class Qwen3NextForCausalLM(DecoderLM):
    """The Qwen3-Next network. Its multi-token prediction head is not used."""

    config: Qwen3NextConfig

    def __init__(self, config: Qwen3NextConfig, scope: Scope) -> None:
        def make_layer(config: Qwen3NextConfig, layer: int, scope: Scope) -> SequentialBlock:
            experts = make_moe(config, scope / "mlp") if config.sparse_layers[layer] else None
            return delta_layer(config, layer, scope, feed_forward=experts, by_key_head=True)

        super().__init__(config, scope, make_layer, OffsetRMSNorm)

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """See `Network.checkpoint_tensors`."""
        return () if name.startswith("mtp.") else ((name, tensor),)
