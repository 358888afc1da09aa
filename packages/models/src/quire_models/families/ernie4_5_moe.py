"""ERNIE 4.5 (Baidu 2025): neighbouring dimensions are rotated; a bias helps to choose experts, beside shared ones."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.decoder_sizes import decoder_sizes, expert_counts
from quire_models.feed_forward_spec import Routing
from quire_models.spec import HeadSpec, NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """Every so many layers between the first and the last have experts; one flag for all biases. Probabilities of a
    token's experts are divided by their sum, but by no less than `moe_norm_min`."""
    bias = config.flag("use_bias", default=False)
    sizes = decoder_sizes(config, tied=True, theta=500000.0)
    num_experts, per_token = expert_counts(config, "moe_num_experts", "moe_k")
    first = config.integer("moe_layer_start_index", default=1, minimum=0)
    last = config.integer("moe_layer_end_index", default=-1, minimum=-1)
    step = config.integer("moe_layer_interval", default=1, minimum=1)
    last = sizes.num_layers - 1 if last == -1 else last
    inner = config.integer("moe_intermediate_size", default=1536, minimum=1)
    shared = inner * config.integer("moe_num_shared_experts", default=2, minimum=0)
    minimum = config.number("moe_norm_min", default=1e-12, minimum=0.0)
    moe = sizes.moe(
        num_experts,
        inner,
        Routing(top_k=per_token, scoring="softmax", renormalize=True, minimum=minimum),
        correction_bias="moe_statics.e_score_correction_bias",
        is_correction_parameter=True,
        shared=sizes.gated_mlp("mlp.shared_experts", shared, bias=bias) if shared else None,
    )
    attention, mlp = sizes.attention(bias=bias, interleaved=True), sizes.gated_mlp(bias=bias)
    sparse = [first <= layer <= last and (layer + 1) % step == 0 for layer in sizes.layers]
    return sizes.network(
        (sizes.pre_norm(layer, attention, moe if sparse[layer] else mlp) for layer in sizes.layers),
        head=HeadSpec(tied=sizes.tied, bias=bias),
    )
