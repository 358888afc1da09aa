"""Command-R (Cohere 2024): attention and feed-forward side by side, layer norms without biases, scaled logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire_interfaces import Fields
from quire_models.config_fields import layer_windows
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.mixer_spec import SelfAttentionSpec
from quire_models.spec import HeadSpec, LayerSpec, NetworkSpec, NormSpec

__all__ = ["cohere_layer", "cohere_parts", "spec", "spec_of_cohere2"]


def spec(config: Fields) -> NetworkSpec:
    """In Command-R+ each head of queries and keys is layer-normalised with a weight of its own."""
    sizes, attention, head = cohere_parts(config, theta=500000.0)
    if config.flag("use_qk_norm", default=False):
        attention = replace(
            attention,
            q_norm=_norm(sizes, "q_norm", sizes.head_dim, num_heads=sizes.num_heads),
            k_norm=_norm(sizes, "k_norm", sizes.head_dim, num_heads=sizes.num_kv_heads),
        )
    return sizes.network(
        (cohere_layer(sizes, layer, attention) for layer in sizes.layers), final_norm=_norm(sizes, "norm"), head=head
    )


def spec_of_cohere2(config: Fields) -> NetworkSpec:
    """Command R7B and Command A (Cohere 2024): three sliding layers, which are rotated, then one of full attention that
    knows no positions, unless `layer_types` says otherwise."""
    sizes, attention, head = cohere_parts(config, theta=10000.0)
    period = config.integer("sliding_window_pattern", default=4, minimum=1)
    windows = layer_windows(config, sizes.num_layers, tuple((layer + 1) % period != 0 for layer in sizes.layers))
    layers = (
        cohere_layer(
            sizes, layer, replace(attention, sliding_window=window, rope=sizes.rope if window is not None else None)
        )
        for layer, window in enumerate(windows)
    )
    return sizes.network(layers, final_norm=_norm(sizes, "norm"), head=head)


def cohere_parts(config: Fields, *, theta: float) -> tuple[DecoderSizes, SelfAttentionSpec, HeadSpec]:
    """What Cohere and Cohere 2 have in common."""
    bias = config.flag("attention_bias", default=False)
    sizes = decoder_sizes(config.named(rms_norm_eps="layer_norm_eps"), tied=True, theta=theta, eps=1e-5)
    head = HeadSpec(tied=sizes.tied, factor=config.number("logit_scale", default=0.0625))
    return sizes, sizes.attention(bias=bias, interleaved=True), head


def cohere_layer(sizes: DecoderSizes, layer: int, attention: SelfAttentionSpec) -> LayerSpec:
    """One layer: both parts behind the same norm."""
    return LayerSpec(
        name=f"model.layers.{layer}",
        mixers=(attention,),
        feed_forward=sizes.gated_mlp(),
        input_norm=_norm(sizes, "input_layernorm"),
        arrangement="parallel",
    )


def _norm(sizes: DecoderSizes, name: str, size: int | None = None, **fields: Any) -> NormSpec:
    return sizes.layer_norm(name, size, has_bias=False, **fields)
