"""Mistral (Jiang et al. 2023) and Ministral (Mistral AI 2024): Llama without biases, with a sliding window in every
layer, or in some. And the language model of Voxtral Realtime (Mistral AI 2026), which writes while it hears."""

from __future__ import annotations

from dataclasses import replace

from quire_interfaces import Fields
from quire_models.config_fields import layer_windows
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.spec import ConditionedNormSpec, LayerSpec, NetworkSpec

__all__ = ["spec"]

_DELAY_SIZE = 32
"""Width between the two matrices that make a norm's factor of the delay."""


def spec(config: Fields) -> NetworkSpec:
    """Windows in the layers that `layer_types` names, in all of them without it."""
    sizes = decoder_sizes(config)
    windows = layer_windows(config, sizes.num_layers)
    layers = [sizes.pre_norm(layer, sizes.attention(sliding_window=window)) for layer, window in enumerate(windows)]
    if config.get("model_type") != "voxtral_realtime_text":
        return sizes.network(layers)
    num_delay_tokens = config.integer("default_num_delay_tokens", default=6, minimum=0)
    layers = [_delayed(sizes, layer, num_delay_tokens) for layer in layers]
    return sizes.network(layers, embedding=sizes.embedding(adds_media=True))


def _delayed(sizes: DecoderSizes, layer: LayerSpec, num_delay_tokens: int) -> LayerSpec:
    """A layer whose feed-forward network is told how many tokens the text is behind the sound."""
    norm = ConditionedNormSpec(
        name="post_attention_layernorm",
        size=sizes.hidden_size,
        eps=sizes.eps,
        condition=num_delay_tokens,
        condition_name="ada_rms_norm",
        condition_size=_DELAY_SIZE,
    )
    return replace(layer, feed_forward_norm=norm)
