"""Phi (Li et al. 2023; Phi-2): attention and feed-forward side by side behind one layer norm, half a head rotated."""

from __future__ import annotations

from typing import Any

from quire_interfaces import Fields
from quire_models.config_fields import ACTIVATIONS
from quire_models.decoder_sizes import decoder_sizes
from quire_models.mixer_spec import ProjectionNames
from quire_models.spec import HeadSpec, NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """Biases everywhere, in the LM head too."""
    named = config.named(rms_norm_eps="layer_norm_eps")
    sizes = decoder_sizes(named, act="gelu_new", acts=ACTIVATIONS, partial=0.5, eps=1e-5)
    norms: dict[str, Any] = {}
    if config.flag("qk_layernorm", default=False):
        norms = {f"{part}_norm": sizes.layer_norm(f"{part}_layernorm", sizes.head_dim) for part in "qk"}
    attention = sizes.attention(bias=True, names=ProjectionNames(out="dense"), **norms)
    layers = (
        sizes.pre_norm(
            layer,
            attention,
            sizes.mlp(),
            norms=("input_layernorm",),
            norm=sizes.layer_norm,
            arrangement="parallel",
        )
        for layer in sizes.layers
    )
    head = HeadSpec(tied=sizes.tied, bias=True)
    return sizes.network(layers, final_norm=sizes.layer_norm("final_layernorm"), head=head)
