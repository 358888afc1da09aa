"""Jamba (Lieber et al. 2024, arXiv:2403.19887): Mamba in most layers, attention in some, experts in some."""

from __future__ import annotations

from quire_interfaces import CheckpointError, Fields
from quire_models.decoder_sizes import decoder_sizes
from quire_models.feed_forward_spec import Routing
from quire_models.mixer_spec import Mamba1Spec
from quire_models.recurrent_fields import dt_rank
from quire_models.spec import NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """Attention and experts come every so many layers; positions are not rotated."""
    config.fixed("hidden_act", "silu", "swish")  # the mixers take it, too
    sizes = decoder_sizes(config)
    mamba = Mamba1Spec(
        hidden_size=sizes.hidden_size,
        inner_size=config.integer("mamba_expand", default=2, minimum=1) * sizes.hidden_size,
        state_size=config.integer("mamba_d_state", default=16, minimum=1),
        dt_rank=dt_rank(config, "mamba_dt_rank", sizes.hidden_size),
        conv_kernel=config.integer("mamba_d_conv", default=4, minimum=1),
        conv_bias=config.flag("mamba_conv_bias", default=True),
        proj_bias=config.flag("mamba_proj_bias", default=False),
        eps=sizes.eps,
        norms="weighted",
    )
    num_experts = config.integer("num_experts", default=16, minimum=1)
    per_token = config.integer("num_experts_per_tok", default=2, minimum=1)
    if per_token > num_experts > 1:
        raise CheckpointError(
            f"{config.source}: num_experts_per_tok ({per_token}) must be at most num_experts ({num_experts})"
        )
    routing = Routing(top_k=per_token, scoring="softmax")
    moe = sizes.moe(num_experts, sizes.intermediate_size, routing, name="feed_forward", router="router")
    mlp = sizes.gated_mlp("feed_forward")
    mixers, attends = (mamba, sizes.attention(rope=None)), _periodic(config, "attn_layer", (8, 4), sizes.num_layers)
    sparse = _periodic(config, "expert_layer", (2, 1), sizes.num_layers)
    layers = (
        sizes.pre_norm(
            layer,
            mixers[attends[layer]],
            moe if sparse[layer] and num_experts > 1 else mlp,
            norms=("input_layernorm", "pre_ff_layernorm"),
        )
        for layer in sizes.layers
    )
    return sizes.network(layers, final_norm="final_layernorm")


def _periodic(config: Fields, name: str, defaults: tuple[int, int], layers: int) -> list[bool]:
    period = config.integer(f"{name}_period", default=defaults[0], minimum=1)
    offset = config.integer(f"{name}_offset", default=defaults[1], minimum=0)
    return [layer % period == offset for layer in range(layers)]
