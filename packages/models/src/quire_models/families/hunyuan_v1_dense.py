"""Hunyuan, dense (Tencent 2025): Llama whose query and key heads are normalised after they are rotated."""

from __future__ import annotations

from dataclasses import replace

from quire_interfaces import Fields
from quire_models.decoder_sizes import decoder_sizes
from quire_models.rope_config import RopeConfig
from quire_models.spec import NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """A rotation of type "dynamic" with a fixed `alpha` is one with a larger base."""
    bias = config.flag("attention_bias", default=False)
    sizes = decoder_sizes(config, eps=1e-5)
    name = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    rope = Fields(config.get(name) or {}, f"{config.source}: {name}")
    if rope.get("alpha") is not None:
        assert sizes.rope is not None
        stretch = rope.number("alpha", above=0.0) ** (sizes.head_dim / (sizes.head_dim - 2))
        context = config.integer("max_position_embeddings", minimum=1)
        sizes = replace(sizes, rope=RopeConfig(theta=sizes.rope.theta * stretch), max_model_len=context)
    norms = sizes.head_norms("query_layernorm", "key_layernorm")
    attention = sizes.attention(bias=bias, norm_after_rotation=True, **norms)
    return sizes.network(sizes.pre_norm(layer, attention) for layer in sizes.layers)
