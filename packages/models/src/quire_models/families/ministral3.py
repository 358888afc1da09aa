"""Ministral 3 (Mistral AI 2025): Mistral whose queries grow with the logarithm of their position (as in Llama 4)."""

from __future__ import annotations

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import layer_windows
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.mixer_spec import QueryGrowthSpec
from quire_models.spec import NetworkSpec

__all__ = ["query_growth", "spec"]


def spec(config: Fields) -> NetworkSpec:
    """One window for all layers, usually none. Queries have the factor 1 + b * log(1 + floor(position / original
    context))."""
    sizes = decoder_sizes(config, head_dim=128, eps=1e-5)
    windows, growth = layer_windows(config, sizes.num_layers), query_growth(config, sizes)
    return sizes.network(
        sizes.pre_norm(layer, sizes.attention(sliding_window=window, query_growth=growth))
        for layer, window in enumerate(windows)
    )


def query_growth(config: Fields, sizes: DecoderSizes) -> QueryGrowthSpec | None:
    """The growth that `llama_4_scaling_beta` of `rope_parameters` asks for; None for none."""
    rope = Fields(config.get("rope_parameters") or {}, f"{config.source}: rope_parameters")
    beta = rope.number("llama_4_scaling_beta", default=0.0)
    if not beta:
        return None
    step = rope.integer("original_max_position_embeddings", default=0, minimum=0)
    if not step:
        raise CheckpointError(f"{rope.source}: llama_4_scaling_beta needs original_max_position_embeddings")
    return QueryGrowthSpec(scale=beta, step=step, max_positions=sizes.max_model_len)
