"""GLM-4.5 (GLM-4.5 Team 2025): experts scored by sigmoids and chosen in groups, beside a shared one; also what other
families with this routing (DeepSeek-V3, sec. 2.1.2) are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import layer_windows
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes, expert_counts
from quire_models.feed_forward_spec import Routing, SparseMoESpec
from quire_models.spec import CheckpointNames, MixerSpec, NetworkSpec

__all__ = ["LEAST_SCORES", "grouped_moe", "grouped_network", "spec", "spec_of_dots1", "spec_of_solar_open"]

LEAST_SCORES = 1e-20
"""What chosen sigmoids are divided by at least, so that those that are all zero stay zero."""


def spec(config: Fields) -> NetworkSpec:
    """The first layers have no experts; half of each head is rotated; heads may be normalised."""
    sizes = decoder_sizes(config, partial=0.5)
    norms = sizes.head_norms() if config.flag("use_qk_norm", default=False) else {}
    attention = sizes.attention(qkv_bias=config.flag("attention_bias", default=False), **norms)
    return grouped_network(config, sizes, [attention] * sizes.num_layers, grouped_moe(config, sizes), dense_layers=1)


def spec_of_dots1(config: Fields) -> NetworkSpec:
    """dots.llm1 (rednote-hilab 2025): normalised heads, rotated whole; windows from `max_window_layers` on."""
    bias = config.flag("attention_bias", default=False)
    sizes = decoder_sizes(config)
    moe = grouped_moe(config, sizes, renormalize=False)
    first = config.integer("max_window_layers", default=62, minimum=0)
    windows = layer_windows(config, sizes.num_layers, tuple(layer >= first for layer in sizes.layers))
    norms = sizes.head_norms()
    attentions = [sizes.attention(bias=bias, sliding_window=window, **norms) for window in windows]
    return grouped_network(config, sizes, attentions, moe)


def spec_of_solar_open(config: Fields) -> NetworkSpec:
    """Solar Open (Upstage 2025): every layer has experts, and heads are rotated whole."""
    sizes = decoder_sizes(config.named(intermediate_size="moe_intermediate_size"), head_dim=128)
    moe = grouped_moe(config, sizes)
    attention = sizes.attention(qkv_bias=config.flag("attention_bias", default=False))
    every = (True,) * sizes.num_layers
    return grouped_network(config, sizes, [attention] * sizes.num_layers, moe, sparse=every)


def grouped_moe(config: Fields, sizes: DecoderSizes, *, renormalize: bool = True, **fields: Any) -> SparseMoESpec:
    """Experts in groups: a token chooses groups first. Shared experts are one network as wide as all of them.

    Args:
        renormalize: The class's default of `norm_topk_prob`.
        fields: Others of `SparseMoESpec`.

    Raises:
        CheckpointError: Groups that do not divide the experts, or have too few of them.
    """
    num_experts, per_token = expert_counts(config, "n_routed_experts", "num_experts_per_tok")
    groups = config.integer("n_group", default=1, minimum=1)
    chosen = config.integer("topk_group", default=1, minimum=1)
    size = num_experts // groups
    if num_experts % groups or size < 2 or chosen > groups or chosen * size < per_token:
        raise CheckpointError(
            f"{config.source}: n_group ({groups}) must divide n_routed_experts ({num_experts}) into groups of two and "
            f"more, and topk_group ({chosen}) of them must have num_experts_per_tok ({per_token}) experts"
        )
    inner = config.integer("moe_intermediate_size", minimum=1)
    shared = inner * config.integer("n_shared_experts", default=0, minimum=0)
    routing = Routing(
        top_k=per_token,
        scoring="sigmoid",
        renormalize=config.flag("norm_topk_prob", default=renormalize),
        minimum=LEAST_SCORES,
        scale=config.number("routed_scaling_factor", default=1.0),
        num_groups=groups,
        topk_groups=chosen,
        group_best=2,
    )
    values: dict[str, Any] = {
        "correction_bias": "gate.e_score_correction_bias",
        "shared": sizes.gated_mlp("mlp.shared_experts", shared) if shared else None,
    }
    return sizes.moe(num_experts, inner, routing, **values | fields)


def grouped_network(
    config: Fields,
    sizes: DecoderSizes,
    mixers: Sequence[MixerSpec],
    moe: SparseMoESpec,
    *,
    dense_layers: int = 0,
    sparse: Sequence[bool] | None = None,
) -> NetworkSpec:
    """A network of such experts; layers behind the last one, which predict further tokens, are not loaded.

    Args:
        mixers: Of each layer.
        dense_layers: The class's default of `first_k_dense_replace`.
        sparse: Per layer, whether it has experts; None for all behind the first ones.
    """
    dense = config.integer("first_k_dense_replace", default=dense_layers, minimum=0)
    is_sparse = sparse or [layer >= dense for layer in sizes.layers]
    num_mtp = config.integer("num_nextn_predict_layers", default=0, minimum=0)
    behind = range(sizes.num_layers, sizes.num_layers + num_mtp)
    return sizes.network(
        (
            sizes.pre_norm(layer, mixer, moe if has_experts else sizes.gated_mlp())
            for layer, (mixer, has_experts) in enumerate(zip(mixers, is_sparse, strict=True))
        ),
        num_mtp_layers=num_mtp,
        mtp_feed_forward=moe if num_mtp else None,
        checkpoint=CheckpointNames(ignored_prefixes=tuple(f"model.layers.{layer}." for layer in behind)),
    )
