"""Qwen3-Next (Qwen team 2025): gated delta nets, gated attention in every fourth layer, experts; and Qwen3.5's text
networks (Qwen team 2026), without experts, and four projections for each delta net."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import layer_kinds
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.families.qwen2_moe import qwen_moe, sparse_layers
from quire_models.mixer_spec import GatedDeltaSpec
from quire_models.spec import CheckpointNames, FeedForwardSpec, NetworkSpec, NormSpec

__all__ = ["gated_delta", "spec", "spec_of_qwen3_5", "spec_of_qwen3_5_moe"]


def spec(config: Fields) -> NetworkSpec:
    """The experts' fields are Qwen3-MoE's."""
    sizes = _sizes(config, intermediate_size=5632)
    sparse, moe = (False,) * sizes.num_layers, None
    shared = config.integer("shared_expert_intermediate_size", default=512, minimum=1)
    if config.get("num_experts") != 0:
        sparse = sparse_layers(config, sizes.num_layers)
        moe = qwen_moe(config, sizes, inner=512, shared=shared, renormalize=True)
    mlp = sizes.gated_mlp()
    parts: list[FeedForwardSpec] = [moe if moe is not None and is_sparse else mlp for is_sparse in sparse]
    return _network(config, sizes, parts, by_key_head=True)


def spec_of_qwen3_5(config: Fields) -> NetworkSpec:
    """Feed-forward networks in every layer. Text has one position per token, whatever `mrope_section` says."""
    sizes = _sizes(config, intermediate_size=12288)
    return _network(config, sizes, [sizes.gated_mlp()] * sizes.num_layers, by_key_head=False)


def spec_of_qwen3_5_moe(config: Fields) -> NetworkSpec:
    """Experts in every layer, beside one that all tokens share."""
    sizes = _sizes(config, intermediate_size=512)
    shared = config.integer("shared_expert_intermediate_size", default=512, minimum=1)
    moe = qwen_moe(config, sizes, inner=512, shared=shared, renormalize=True)
    return _network(config, sizes, [moe] * sizes.num_layers, by_key_head=False)


def _sizes(config: Fields, *, intermediate_size: int) -> DecoderSizes:
    config.fixed("hidden_act", "silu", "swish")  # the mixers take it, too
    return decoder_sizes(config.with_default("intermediate_size", intermediate_size), head_dim=256, partial=0.25)


def _network(
    config: Fields, sizes: DecoderSizes, feed_forwards: Sequence[FeedForwardSpec], *, by_key_head: bool
) -> NetworkSpec:
    """A network of such layers. Layers that predict further tokens (`mtp.layers`) are not loaded: where config.json
    does not say how many there are, which Qwen3-Next's does not, published checkpoints have one."""
    bias = config.flag("attention_bias", default=False)
    delta = gated_delta(config, sizes, by_key_head=by_key_head)

    def norm(name: str) -> NormSpec:
        return sizes.rms_norm(name, offset=1.0)

    mixers = (delta, sizes.attention(bias=bias, gated=True, **sizes.head_norms(offset=1.0)))
    return sizes.network(
        (
            sizes.pre_norm(layer, mixers[attends], feed_forwards[layer], norm=norm)
            for layer, attends in enumerate(_attends(config, sizes.num_layers))
        ),
        final_norm=norm("norm"),
        num_mtp_layers=config.integer("mtp_num_hidden_layers", default=1, minimum=0),
        checkpoint=CheckpointNames(ignored_prefixes=("mtp.",)),
    )


def gated_delta(config: Fields, sizes: DecoderSizes, **fields: Any) -> GatedDeltaSpec:
    """The gated delta net; `fields` are others of `GatedDeltaSpec`."""
    delta = GatedDeltaSpec(
        hidden_size=sizes.hidden_size,
        num_key_heads=config.integer("linear_num_key_heads", default=16, minimum=1),
        num_value_heads=config.integer("linear_num_value_heads", default=32, minimum=1),
        key_head_dim=config.integer("linear_key_head_dim", default=128, minimum=1),
        value_head_dim=config.integer("linear_value_head_dim", default=128, minimum=1),
        conv_kernel=config.integer("linear_conv_kernel_dim", default=4, minimum=1),
        eps=sizes.eps,
        **fields,
    )
    if delta.num_value_heads % delta.num_key_heads:
        raise CheckpointError(
            f"{config.source}: linear_num_value_heads ({delta.num_value_heads}) must be a multiple of "
            f"linear_num_key_heads ({delta.num_key_heads})"
        )
    return delta


def _attends(config: Fields, layers: int) -> Sequence[bool]:
    """`layer_types`, or every fourth layer (`full_attention_interval`)."""
    interval = config.integer("full_attention_interval", default=4, minimum=1)
    default = [(layer + 1) % interval == 0 for layer in range(layers)]
    return layer_kinds(config, "layer_types", layers, {"full_attention": True, "linear_attention": False}, default)
