"""Persimmon (Adept 2023): squared ReLU, layer-normalised heads, partial rotation."""

from __future__ import annotations

from typing import Any

from quire_interfaces import Fields
from quire_models.config_fields import ACTIVATIONS
from quire_models.decoder_sizes import decoder_sizes
from quire_models.mixer_spec import ProjectionNames
from quire_models.spec import CheckpointNames, NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """Half of each head is rotated when it is not said otherwise."""
    named = config.named(rms_norm_eps="layer_norm_eps", num_key_value_heads="-")
    sizes = decoder_sizes(named, act="relu2", acts=ACTIVATIONS, partial=0.5, eps=1e-5)
    norms: dict[str, Any] = {}
    if config.flag("qk_layernorm", default=True):
        norms = {f"{part}_norm": sizes.layer_norm(f"{part}_layernorm", sizes.head_dim) for part in "qk"}
    attention = sizes.attention(bias=True, names=ProjectionNames(out="dense"), **norms)
    mlp = sizes.mlp(names=("dense_h_to_4h", "dense_4h_to_h"))
    return sizes.network(
        (sizes.pre_norm(layer, attention, mlp, norm=sizes.layer_norm) for layer in sizes.layers),
        final_norm=sizes.layer_norm("final_layernorm"),
        checkpoint=CheckpointNames(fused=(sizes.fused_heads("self_attn.query_key_value"),)),
    )
