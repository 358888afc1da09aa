"""Granite 4 (IBM 2025): Granite's factors around Mamba-2 in most layers, attention in some, experts in all or none."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config_fields import layer_kinds
from quire_models.decoder_sizes import decoder_sizes, expert_counts
from quire_models.families.granite import granite_attention, granite_ends, granite_moe, shared_mlp_names
from quire_models.recurrent_fields import hybrid_mamba2
from quire_models.spec import FeedForwardSpec, NetworkSpec

__all__ = ["LAYER_TYPES", "spec"]

LAYER_TYPES = {"linear_attention": False, "mamba": False, "full_attention": True, "attention": True}
"""Name of a layer's kind -> it attends."""


def spec(config: Fields) -> NetworkSpec:
    """Positions are rotated only where `position_embedding_type` says so."""
    config.fixed("hidden_act", "silu", "swish")  # the mixers take it, too
    sizes = decoder_sizes(config)
    rope = sizes.rope if config.get("position_embedding_type") == "rope" else None
    config.skip("mlp_bias")
    num_experts, per_token = 0, 0
    if config.get("num_local_experts") != 0:
        num_experts, per_token = expert_counts(config, "num_local_experts", "num_experts_per_tok")
    shared = config.integer("shared_intermediate_size", default=1024, minimum=1)
    feed_forward: FeedForwardSpec = sizes.gated_mlp("shared_mlp", shared)
    if num_experts:
        feed_forward = granite_moe(sizes, num_experts, per_token, shared)
    mixers = (hybrid_mamba2(config, sizes), granite_attention(config, sizes, rope=rope))
    factor = config.number("residual_multiplier", default=1.0)
    name = "layer_types" if config.get("layer_types") else "layers_block_type"
    mambas = [False] * sizes.num_layers
    layers = (
        sizes.pre_norm(layer, mixers[attends], feed_forward, residual_factor=factor)
        for layer, attends in enumerate(layer_kinds(config, name, sizes.num_layers, LAYER_TYPES, mambas))
    )
    names = shared_mlp_names(sizes, shared)
    return sizes.network(layers, checkpoint=names, **granite_ends(config, sizes))
