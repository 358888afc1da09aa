"""Bamba (IBM, Princeton, CMU, UIUC 2024): Mamba-2 in most layers, attention in some."""

from __future__ import annotations

from quire_interfaces import CheckpointError, Fields
from quire_models.decoder_sizes import decoder_sizes
from quire_models.recurrent_fields import hybrid_mamba2
from quire_models.spec import NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """Half of each head is rotated, whatever the file says."""
    config.fixed("hidden_act", "silu", "swish")  # the mixers take it, too
    sizes = decoder_sizes(config, partial=0.5)
    listed = config.get("attn_layer_indices") or []
    if not isinstance(listed, list) or any(type(layer) is not int for layer in listed):
        raise CheckpointError(f"{config.source}: attn_layer_indices must be a list of layers, is {listed!r}")
    attention = sizes.attention(bias=config.flag("attention_bias", default=False))
    mamba = hybrid_mamba2(config, sizes)
    mlp = sizes.gated_mlp("feed_forward", bias=config.flag("mlp_bias", default=False))
    norms = ("input_layernorm", "pre_ff_layernorm")
    layers = (
        sizes.pre_norm(layer, attention if layer in listed else mamba, mlp, norms=norms) for layer in sizes.layers
    )
    return sizes.network(layers, final_norm="final_layernorm")
