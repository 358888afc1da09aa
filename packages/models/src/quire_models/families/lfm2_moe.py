"""LFM2 with experts (Liquid AI 2025): all layers but the first ones have experts that are scored by sigmoids."""

from __future__ import annotations

from dataclasses import replace

from quire_interfaces import Fields
from quire_models.decoder_sizes import expert_counts
from quire_models.families import lfm2
from quire_models.feed_forward_spec import Routing, SparseMoESpec
from quire_models.spec import NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """A bias helps to choose experts where `use_expert_bias` does not say otherwise; scores are made to sum to one."""
    network = lfm2.spec(config.with_default("block_auto_adjust_ff_dim", False))
    num_experts, per_token = expert_counts(config, "num_experts", "num_experts_per_tok")
    dense = config.integer("num_dense_layers", default=2, minimum=0)
    moe = SparseMoESpec(
        name="feed_forward",
        hidden_size=network.hidden_size,
        num_experts=num_experts,
        intermediate_size=config.integer("moe_intermediate_size", minimum=1),
        act="silu",
        routing=Routing(
            top_k=per_token,
            scoring="sigmoid",
            renormalize=config.flag("norm_topk_prob", default=True),
            minimum=1e-6,
            scale=config.number("routed_scaling_factor", default=1.0),
        ),
        correction_bias="expert_bias" if config.flag("use_expert_bias", default=True) else "",
    )
    layers = tuple(
        layer if number < dense else replace(layer, feed_forward=moe) for number, layer in enumerate(network.layers)
    )
    names = (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj"))
    renamed = tuple((f".{old}.", f".{new}.") for old, new in names)
    return replace(network, layers=layers, checkpoint=replace(network.checkpoint, renamed=renamed))
