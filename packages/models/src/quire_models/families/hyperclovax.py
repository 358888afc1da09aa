"""HyperCLOVA X (NAVER 2025): Granite's factors, logits multiplied by theirs, and norms behind each part too."""

from __future__ import annotations

from typing import Any

from quire_interfaces import Fields
from quire_models.decoder_sizes import decoder_sizes
from quire_models.families.granite import granite_ends
from quire_models.spec import HeadSpec, NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """Without `use_post_norm` there are norms before the parts only."""
    sizes = decoder_sizes(config)
    attention = sizes.attention(
        bias=config.flag("attention_bias", default=False),
        scale=config.number("attention_multiplier", default=sizes.head_dim**-0.5),
    )
    mlp = sizes.gated_mlp(bias=config.flag("mlp_bias", default=False))
    behind: dict[str, Any] = {}
    if config.flag("use_post_norm", default=True):
        behind = {"attention_out_norm": "post_norm1", "feed_forward_out_norm": "post_norm2"}
        behind = {field: sizes.rms_norm(name) for field, name in behind.items()}
    factor = config.number("residual_multiplier", default=1.0)
    ends = granite_ends(config, sizes) | {
        "head": HeadSpec(tied=sizes.tied, factor=config.number("logits_scaling", default=1.0))
    }
    layers = (sizes.pre_norm(layer, attention, mlp, residual_factor=factor, **behind) for layer in sizes.layers)
    return sizes.network(layers, **ends)
