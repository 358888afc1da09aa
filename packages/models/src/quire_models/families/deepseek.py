"""DeepSeekMoE (Dai et al. 2024, arXiv:2401.06066): Llama with fine-grained experts beside shared ones."""

from __future__ import annotations

from dataclasses import replace

from quire_interfaces import Fields
from quire_models.decoder_sizes import decoder_sizes
from quire_models.families.glm4_moe import grouped_moe, grouped_network
from quire_models.spec import NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """Experts are the most probable ones of all; every `moe_layer_freq`-th layer behind the first ones has them."""
    config.fixed("scoring_func", "softmax")
    sizes = decoder_sizes(config)
    attention = sizes.attention(bias=config.flag("attention_bias", default=False))
    if config.get("n_routed_experts") is None:
        return sizes.network(sizes.pre_norm(layer, attention) for layer in sizes.layers)
    moe = grouped_moe(config.named(n_group="-", topk_group="-"), sizes, renormalize=False, correction_bias="")
    routing = replace(moe.routing, scoring="softmax", minimum=0.0, group_best=1, scale=1.0)
    dense = config.integer("first_k_dense_replace", default=0, minimum=0)
    step = config.integer("moe_layer_freq", default=1, minimum=1)
    sparse = [layer >= dense and layer % step == 0 for layer in sizes.layers]
    return grouped_network(config, sizes, [attention] * sizes.num_layers, replace(moe, routing=routing), sparse=sparse)
