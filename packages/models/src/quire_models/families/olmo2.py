"""OLMo 2 (OLMo Team 2024): norms stand behind attention and feed-forward, and over all heads of queries and keys; and
OLMo 3 (OLMo Team 2025), with windows in three of four layers, which are rotated without scaling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire_interfaces import Fields
from quire_models.config_fields import layer_windows
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.mixer_spec import SelfAttentionSpec
from quire_models.rope_config import parse_rope
from quire_models.spec import NetworkSpec

__all__ = ["spec", "spec_of_olmo3"]


def spec(config: Fields) -> NetworkSpec:
    """Queries and keys are normalised over all heads at once."""
    sizes, attention = _parts(config, theta=10000.0)
    return sizes.network(sizes.post_norm(layer, attention) for layer in sizes.layers)


def spec_of_olmo3(config: Fields) -> NetworkSpec:
    """Three sliding layers, then one of full attention, unless `layer_types` says otherwise. Scaling of the rotation is
    for the latter only."""
    sizes, attention = _parts(config, theta=500000.0)
    positions = config.integer("max_position_embeddings", minimum=1)
    windows = layer_windows(config, sizes.num_layers, tuple((layer + 1) % 4 != 0 for layer in sizes.layers))
    fields: dict[str, Any] = {"max_position_embeddings": positions, "theta": 500000.0}
    rope = parse_rope(config, layers="full_attention", **fields)
    local_rope = parse_rope(config.named(rope_scaling="-"), layers="sliding_attention", **fields)
    sizes = replace(sizes, max_model_len=rope.context_length(positions))
    return sizes.network(
        sizes.post_norm(layer, replace(attention, sliding_window=window, rope=rope if window is None else local_rope))
        for layer, window in enumerate(windows)
    )


def _parts(config: Fields, *, theta: float) -> tuple[DecoderSizes, SelfAttentionSpec]:
    """What OLMo 2 and 3 have in common."""
    bias = config.flag("attention_bias", default=False)
    sizes = decoder_sizes(config, theta=theta, eps=1e-5)
    return sizes, sizes.attention(bias=bias, **sizes.projection_norms())
