"""Granite 3 (IBM 2024): Llama with constant factors for embedding, scores, residuals and logits; and its mixtures of
experts, which tokens choose by logits, in every layer. Later ones (IBM 2026) have windows, sinks, and a base of the
rotation for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire_interfaces import Fields
from quire_models.config_fields import layer_thetas, layer_windows
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes, expert_counts
from quire_models.feed_forward_spec import Routing, SparseMoESpec, StackedExperts
from quire_models.mixer_spec import SelfAttentionSpec
from quire_models.spec import CheckpointNames, FeedForwardSpec, HeadSpec, NetworkSpec

__all__ = [
    "granite_attention",
    "granite_ends",
    "granite_moe",
    "shared_mlp_names",
    "spec",
    "spec_of_moe",
    "spec_of_moe_swa",
    "spec_of_swa",
]


def spec(config: Fields) -> NetworkSpec:
    """All factors are 1 when they are not given."""
    sizes = decoder_sizes(config)
    return _network(config, sizes, _mlp(config, sizes), _alike(config, sizes))


def spec_of_moe(config: Fields) -> NetworkSpec:
    """Every layer has experts; some files have a feed-forward network beside them that every token uses."""
    sizes = decoder_sizes(config)
    return _moe_network(config, sizes, _alike(config, sizes))


def spec_of_swa(config: Fields) -> NetworkSpec:
    """Attention with sinks; of four layers one attends to all tokens, where `layer_types` does not say."""
    sizes = decoder_sizes(config, tied=True, eps=1e-5)
    return _network(config, sizes, _mlp(config, sizes), _with_windows(config, sizes))


def spec_of_moe_swa(config: Fields) -> NetworkSpec:
    """The same with experts, whose tensors have the names of Transformers' class, or those of the other mixtures."""
    sizes = decoder_sizes(config)
    network = _moe_network(config, sizes, _with_windows(config, sizes))
    moe = network.layers[0].feed_forward
    assert isinstance(moe, SparseMoESpec)
    moe = replace(moe, router="router", stacked=StackedExperts())
    prefix = ".block_sparse_moe."
    renamed = {"router.layer.": "router.", "input_linear.weight": "experts.gate_up_proj"}
    renamed |= {"output_linear.weight": "experts.down_proj"}
    names = network.checkpoint.renamed + tuple((prefix + old, prefix + new) for old, new in renamed.items())
    return replace(
        network,
        layers=tuple(replace(layer, feed_forward=moe) for layer in network.layers),
        checkpoint=replace(network.checkpoint, renamed=names),
    )


def _mlp(config: Fields, sizes: DecoderSizes) -> FeedForwardSpec:
    return sizes.gated_mlp(bias=config.flag("mlp_bias", default=False))


def _moe_network(config: Fields, sizes: DecoderSizes, attentions: Sequence[SelfAttentionSpec]) -> NetworkSpec:
    config.skip("mlp_bias")
    num_experts, per_token = expert_counts(config, "num_local_experts", "num_experts_per_tok")
    shared = config.integer("shared_intermediate_size", default=0, minimum=0)
    network = _network(config, sizes, granite_moe(sizes, num_experts, per_token, shared), attentions)
    return replace(network, checkpoint=shared_mlp_names(sizes, shared))


def _network(
    config: Fields, sizes: DecoderSizes, feed_forward: FeedForwardSpec, attentions: Sequence[SelfAttentionSpec]
) -> NetworkSpec:
    factor = config.number("residual_multiplier", default=1.0)
    layers = (
        sizes.pre_norm(layer, attention, feed_forward, residual_factor=factor)
        for layer, attention in enumerate(attentions)
    )
    return sizes.network(layers, **granite_ends(config, sizes))


def _alike(config: Fields, sizes: DecoderSizes) -> Sequence[SelfAttentionSpec]:
    return [granite_attention(config, sizes)] * sizes.num_layers


def _with_windows(config: Fields, sizes: DecoderSizes) -> Sequence[SelfAttentionSpec]:
    """Per layer: attention with its window, and with the base of `layer_rope_theta`, 0 for no positions."""
    num, rope = sizes.num_layers, sizes.rope
    assert rope is not None
    thetas = layer_thetas(config, [rope.theta] * num)
    slides = tuple(layer % 4 != 0 for layer in sizes.layers)
    windows = layer_windows(config.with_default("sliding_window", 128), num, slides)
    attention = granite_attention(config, sizes, sinks=True)
    return [
        replace(attention, sliding_window=window, rope=replace(rope, theta=float(theta)) if theta else None)
        for window, theta in zip(windows, thetas, strict=True)
    ]


def granite_attention(config: Fields, sizes: DecoderSizes, **fields: Any) -> SelfAttentionSpec:
    """Attention whose scores have a factor of their own."""
    bias = config.flag("attention_bias", default=False)
    return sizes.attention(bias=bias, scale=config.number("attention_multiplier", default=1.0), **fields)


def granite_ends(config: Fields, sizes: DecoderSizes) -> dict[str, Any]:
    """Fields of `NetworkSpec`: an embedding with a factor, a head with a divisor."""
    scaling = config.number("logits_scaling", default=1.0, above=0.0)
    return {
        "embedding": sizes.embedding(factor=config.number("embedding_multiplier", default=1.0), scales_media=True),
        "head": HeadSpec(tied=sizes.tied, factor=1.0 / scaling),
    }


def granite_moe(sizes: DecoderSizes, num_experts: int, per_token: int, shared: int) -> SparseMoESpec:
    """The experts of the largest logits, whose weights are the softmax over these, beside a network `shared` wide."""
    return sizes.moe(
        num_experts,
        sizes.intermediate_size,
        Routing(top_k=per_token, scoring="softmax_of_chosen"),
        name="block_sparse_moe",
        router="router.layer",
        stacked=StackedExperts(names=("input_linear.weight", "output_linear.weight")),
        shared=sizes.gated_mlp("shared_mlp", shared) if shared else None,
    )


def shared_mlp_names(sizes: DecoderSizes, shared: int) -> CheckpointNames:
    """Gate and up of the network that every token uses are one matrix."""
    return CheckpointNames(
        renamed=((".shared_mlp.output_linear.", ".shared_mlp.down_proj."),),
        fused=(sizes.fused_gate_up("shared_mlp.input_linear", shared),),
    )
