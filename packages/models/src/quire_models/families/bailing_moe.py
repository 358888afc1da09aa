"""Ling (inclusionAI 2025, arXiv:2503.05139): experts that are chosen by softmax beside shared ones; and Ling 2.0
(arXiv:2510.22115), with sigmoids, groups of experts, a bias that helps to choose, and normalised heads."""

from __future__ import annotations

from dataclasses import replace

from quire_interfaces import Fields
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.families.glm4_moe import grouped_moe
from quire_models.feed_forward_spec import SparseMoESpec
from quire_models.mixer_spec import ProjectionNames
from quire_models.spec import CheckpointNames, NetworkSpec

__all__ = ["bailing_experts", "spec", "spec_of_param2", "spec_of_v2"]


def spec(config: Fields) -> NetworkSpec:
    """The first `first_k_dense_replace` layers have no experts; layers behind the last one are not loaded."""
    return _network(config)


def spec_of_v2(config: Fields) -> NetworkSpec:
    """Ling 2.0 and Sarvam's smaller network: sigmoids, a bias that helps to choose and normalised heads are what their
    classes have where config.json does not say."""
    return _network(_of_v2(config))


def spec_of_param2(config: Fields) -> NetworkSpec:
    """Param2 (BharatGen): as Ling 2.0, but `moe_shared_expert_intermediate_size` is that of all shared experts."""
    return _network(_of_v2(config), is_shared_total=True)


def _of_v2(config: Fields) -> Fields:
    config = config.with_default("score_function", "sigmoid").with_default("use_qk_norm", True)
    return config.with_default("moe_router_enable_expert_bias", True)


def _network(config: Fields, *, is_shared_total: bool = False) -> NetworkSpec:
    config.fixed("norm_head", False)
    config.fixed("norm_softmax", False)
    bias = config.flag("use_bias", default=False)
    sizes = decoder_sizes(config, partial=1.0)
    if config.get("rotary_dim") is not None:
        sizes = replace(sizes, rotary_dim=config.integer("rotary_dim", minimum=2))
    if config.flag("use_qk_norm", default=False):
        config.fixed("use_rmsnorm", True)
        norms = sizes.head_norms("query_layernorm", "key_layernorm")
    else:
        norms = {}
    attention = sizes.attention(
        name="attention",
        names=ProjectionNames(out="dense"),
        qkv_bias=bias or config.flag("use_qkv_bias", default=False),
        out_bias=bias,
        **norms,
    )
    moe = bailing_experts(config, sizes, is_shared_total=is_shared_total)
    mlp = sizes.gated_mlp(bias=bias)
    dense = config.integer("first_k_dense_replace", default=0, minimum=0)
    num_mtp = config.integer("num_nextn_predict_layers", default=0, minimum=0)
    behind = range(sizes.num_layers, sizes.num_layers + num_mtp)
    return sizes.network(
        (sizes.pre_norm(layer, attention, mlp if layer < dense else moe) for layer in sizes.layers),
        embedding=sizes.embedding("word_embeddings"),
        checkpoint=CheckpointNames(
            ignored_prefixes=tuple(f"model.layers.{layer}." for layer in behind),
            fused=(sizes.fused_qkv("attention.query_key_value"),),
        ),
    )


def bailing_experts(
    config: Fields, sizes: DecoderSizes, bias_name: str = "gate.expert_bias", *, is_shared_total: bool = False
) -> SparseMoESpec:
    """Experts by `score_function`, whose groups are those of DeepSeek-V3 (sec. 2.1.2).

    Args:
        bias_name: Name of the bias that helps to choose.
        is_shared_total: `moe_shared_expert_intermediate_size` is the width of all shared experts together, not of one.
    """
    bias = config.flag("use_bias", default=False)
    score = config.text("score_function", default="softmax")
    config.fixed("score_function", "softmax", "sigmoid")
    named = config.named(n_routed_experts="num_experts", n_shared_experts="num_shared_experts")
    if score == "softmax":
        named = named.named(n_group="-", topk_group="-")
    num_shared = config.integer("num_shared_experts", default=0, minimum=0)
    width = config.integer("moe_shared_expert_intermediate_size", default=None, minimum=1)
    if width is not None and is_shared_total:
        inner = width if num_shared else 0
    else:
        inner = num_shared * (width or config.integer("moe_intermediate_size", minimum=1))
    has_bias = config.flag("moe_router_enable_expert_bias", default=False)
    moe = grouped_moe(
        named,
        sizes,
        correction_bias=bias_name if has_bias else "",
        shared=sizes.gated_mlp("mlp.shared_experts", inner, bias=bias) if inner else None,
    )
    if score == "softmax":
        moe = replace(moe, routing=replace(moe.routing, scoring="softmax", minimum=0.0, group_best=1))
    return moe
