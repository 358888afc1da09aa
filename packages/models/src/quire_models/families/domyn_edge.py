"""Domyn's small networks (Domyn 2026): heads of another size in each layer, normalised, queries without a weight; norms
before and behind each part; windows, and layers without positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import layer_kinds
from quire_models.decoder_sizes import decoder_sizes
from quire_models.mixer_spec import SelfAttentionSpec
from quire_models.spec import LayerSpec, NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """`window_sizes` are [tokens before, tokens behind] of each layer, not above zero for no window; `position_layers`
    names "rope" or "nope", `per_layer_config` has the `head_dim`."""
    sizes = decoder_sizes(config)
    windows = _windows(config, sizes.num_layers)
    rotates = layer_kinds(config, "position_layers", sizes.num_layers, {"rope": True, "nope": False})

    def attention(layer: int) -> SelfAttentionSpec:
        size = _head_dim(config, layer, sizes.head_dim)
        own = replace(sizes, head_dim=size, rotary_dim=size)
        norms = own.head_norms()
        return own.attention(
            name="attention",
            q_norm=replace(norms["q_norm"], has_weight=False),
            k_norm=norms["k_norm"],
            rope=sizes.rope if rotates[layer] else None,
            sliding_window=windows[layer] + 1 if windows[layer] > 0 else None,
        )

    return sizes.network(
        LayerSpec(
            name=f"model.layers.{layer}",
            mixers=(attention(layer),),
            feed_forward=sizes.gated_mlp("feedforward"),
            input_norm=sizes.rms_norm("pre_attention_norm"),
            attention_out_norm=sizes.rms_norm("post_attention_norm"),
            feed_forward_norm=sizes.rms_norm("pre_feedforward_norm"),
            feed_forward_out_norm=sizes.rms_norm("post_feedforward_norm"),
        )
        for layer in sizes.layers
    )


def _windows(config: Fields, layers: int) -> list[int]:
    """Per layer: how many tokens before a token it sees, not above zero for all."""
    windows = config.get("window_sizes") or [[0, 0]] * layers
    if not isinstance(windows, list) or len(windows) != layers:
        raise CheckpointError(f"{config.source}: window_sizes must name one for each of {layers} layers")
    for window in windows:
        if not isinstance(window, list) or len(window) != 2 or not all(type(size) is int for size in window):
            raise CheckpointError(
                f"{config.source}: window_sizes must be pairs [tokens before, tokens behind] of whole numbers, one is "
                f"{window!r}"
            )
    return [before for before, _ in windows]


def _head_dim(config: Fields, layer: int, default: int) -> int:
    layers: Any = config.get("per_layer_config") or {}
    if isinstance(layers, list) and layer < len(layers):
        own = layers[layer]
    elif isinstance(layers, Mapping):
        own = layers.get(str(layer))
    else:
        raise CheckpointError(
            f"{config.source}: per_layer_config must have an object for each layer; layer {layer} has none"
        )
    if own is not None and not isinstance(own, Mapping):
        raise CheckpointError(f"{config.source}: per_layer_config must have objects, has {own!r} for layer {layer}")
    return Fields(own or {}, f"{config.source}: per_layer_config").integer("head_dim", default=default, minimum=2)
