"""Gemma (Gemma Team 2024): Llama with a scaled embedding, a GELU gate, and norm weights stored less one."""

from __future__ import annotations

from dataclasses import replace

from quire_interfaces import Fields
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.spec import EmbeddingSpec, NetworkSpec, NormSpec

__all__ = ["gemma_embedding", "gemma_norm", "spec"]


def spec(config: Fields) -> NetworkSpec:
    """The activation "gelu" of the first releases means its tanh approximation."""
    config.fixed("use_bidirectional_attention", False)
    bias = config.flag("attention_bias", default=False)
    named = config.named(hidden_act="hidden_activation") if config.get("hidden_activation") is not None else config
    sizes = decoder_sizes(named, tied=True, head_dim=256, act="gelu_pytorch_tanh", acts={"gelu", "gelu_erf"})
    sizes = replace(sizes, act="gelu")

    def norm(name: str) -> NormSpec:
        return gemma_norm(sizes, name)

    layers = (sizes.pre_norm(layer, sizes.attention(bias=bias), norm=norm) for layer in sizes.layers)
    return sizes.network(layers, embedding=gemma_embedding(sizes), final_norm=norm("norm"))


def gemma_embedding(sizes: DecoderSizes) -> EmbeddingSpec:
    """An embedding times the root of the hidden size, rounded to the network's dtype."""
    return sizes.embedding(factor=sizes.hidden_size**0.5, is_factor_rounded=True)


def gemma_norm(sizes: DecoderSizes, name: str, size: int | None = None) -> NormSpec:
    """An RMS norm whose weight is stored less one."""
    return sizes.rms_norm(name, size, offset=1.0)
