"""Decoders whose tokens see those behind them too, which makes encoders of them. Free of torch."""

from __future__ import annotations

import dataclasses
from dataclasses import fields, replace

from quire_interfaces import CheckpointError, Fields
from quire_models.encoder_spec import EncoderAttentionSpec, EncoderSpec
from quire_models.mixer_spec import SelfAttentionSpec
from quire_models.spec import LayerSpec, MixerSpec, NetworkSpec, recast

__all__ = ["as_encoder", "is_bidirectional"]

_PLAIN = frozenset(
    {"name", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "names", "qkv_bias", "out_bias", "scale", "rope"}
    | {"rotary_dim", "interleaved", "sliding_window", "q_norm", "k_norm"}
)
"""Fields of `SelfAttentionSpec` that an encoder's attention has in its way; the others must be as they are by
default."""


def is_bidirectional(config: Fields) -> bool:
    """config.json says that tokens see all of their text: `is_causal` false, as embedding models made of Qwen2, Qwen3
    and Llama have it, or `use_bidirectional_attention`, as EmbeddingGemma has it."""
    both_ways = config.get("use_bidirectional_attention")
    return not config.flag("is_causal", default=True) or both_ways is True or both_ways == "all"


def as_encoder(network: NetworkSpec, config: Fields) -> EncoderSpec:
    """An encoder of a decoder's layers.

    Args:
        config: config.json. Windows are those of EmbeddingGemma: half of `sliding_window` to each side.

    Raises:
        CheckpointError: The decoder has something that encoders have not, by its name.
    """

    def refuse(what: str) -> CheckpointError:
        return CheckpointError(f"{config.source}: {what} is not supported where attention is bidirectional")

    def attention(mixer: MixerSpec) -> EncoderAttentionSpec:
        if type(mixer) is not SelfAttentionSpec:
            raise refuse(type(mixer).__name__)
        for field in fields(mixer):
            if field.name not in _PLAIN and getattr(mixer, field.name) != field.default:
                raise refuse(f"{field.name} of attention")
        if mixer.rope is not None and mixer.rotary_dim != int(mixer.head_dim * mixer.rope.partial_rotary_factor):
            raise refuse("a rotation of a part of each head")
        unbiased = () if mixer.qkv_bias else tuple(mixer.names[:3])
        return EncoderAttentionSpec(
            name=mixer.name,
            hidden_size=mixer.hidden_size,
            num_heads=mixer.num_heads,
            kv_heads=mixer.num_kv_heads,
            head_dim=mixer.head_dim,
            scale=mixer.scale,
            bias=mixer.qkv_bias or mixer.out_bias,
            unbiased=unbiased if mixer.out_bias else (*unbiased, mixer.names.out),
            names=mixer.names,
            sliding_window=None if mixer.sliding_window is None else mixer.sliding_window // 2,
            rope=mixer.rope,
            interleaved=mixer.interleaved,
            q_norm=mixer.q_norm,
            k_norm=mixer.k_norm,
        )

    def encoder_layer(layer: LayerSpec) -> LayerSpec:
        if layer.built_by or len(layer.mixers) != 1 or layer.feed_forward is None or layer.arrangement == "parallel":
            raise refuse(f"{layer.name}, a layer of another kind than attention and a feed-forward network,")
        return replace(layer, mixers=(attention(layer.mixers[0]),))

    has_windows = any(getattr(mixer, "sliding_window", None) is not None for mixer in network.mixers)
    if has_windows and config.get("use_bidirectional_attention") is None:
        raise refuse("a sliding window")
    layers = tuple(encoder_layer(layer) for layer in network.layers)
    network = dataclasses.replace(network, layers=layers, max_encoder_len=network.max_model_len, has_lm_head=False)
    return recast(EncoderSpec, network)
