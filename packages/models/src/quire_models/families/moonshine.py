"""Moonshine (Jeffries et al. 2024, "Moonshine: Speech Recognition for Live Transcription and Voice Commands"): an
encoder reads the samples of a sound of any length, and a decoder writes what is said in it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import ACTIVATIONS, GATED_ACTS, hidden_act
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.encoder_spec import (
    CrossLayerSpec,
    EncoderAttentionSpec,
    EncoderDecoderSpec,
    start_token_ids,
)
from quire_models.mixer_spec import LLAMA_NAMES
from quire_models.spec import (
    CheckpointNames,
    FusedRows,
    HeadSpec,
    LayerSpec,
    NetworkSpec,
    SampleConvolution,
    Weight,
    num_sound_tokens,
)

__all__ = ["MAX_SAMPLES", "MoonshineSpec", "moonshine_network", "spec"]

MAX_SAMPLES = 30 * 16_000
"""Longest sounds that the networks were trained on (sec. 3.2 there)."""
_CONVOLUTIONS = (SampleConvolution(127, 64), SampleConvolution(7, 3), SampleConvolution(3, 2))
_SAMPLES = math.prod(each.stride for each in _CONVOLUTIONS)
"""Of a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoonshineSpec(EncoderDecoderSpec):
    """A network whose encoder reads samples."""

    built_by: ClassVar[str] = "quire_models.families.moonshine_layers:MoonshineForConditionalGeneration"

    @property
    def convolution_sizes(self) -> tuple[tuple[int, int], ...]:
        """(input channels, output channels) of each convolution."""
        return (1, self.hidden_size), (self.hidden_size, 2 * self.hidden_size), (2 * self.hidden_size, self.hidden_size)

    def weights(self) -> Iterator[Weight]:
        """All parameters by their full names, but the table of tokens."""
        yield from EncoderDecoderSpec.weights(self)
        for number, (each, sizes) in enumerate(zip(self.sound_convolutions, self.convolution_sizes, strict=True), 1):
            yield Weight(f"model.encoder.conv{number}.weight", (sizes[1], sizes[0], each.width), "embedding")
            if number > 1:
                yield Weight(f"model.encoder.conv{number}.bias", (sizes[1],), "embedding")
        for name in ("weight", "bias"):
            yield Weight(f"model.encoder.groupnorm.{name}", (self.hidden_size,), "norm")


def spec(config: Fields) -> NetworkSpec:
    """Norms without biases stand before the parts; positions come by rotation of pairs of neighbours, in nine tenths of
    each head."""
    named = config.named(
        num_attention_heads="decoder_num_attention_heads",
        num_hidden_layers="decoder_num_hidden_layers",
        num_key_value_heads="decoder_num_key_value_heads",
        hidden_act="decoder_hidden_act",
        rms_norm_eps="-",
    )
    sizes = decoder_sizes(named, tied=True, act="silu", acts=GATED_ACTS, partial=0.9, eps=1e-5, context=512)
    for field in ("encoder_num_attention_heads", "encoder_num_key_value_heads", "decoder_num_key_value_heads"):
        heads = config.integer(field, default=sizes.num_heads, minimum=1)
        if heads != sizes.num_heads:
            raise CheckpointError(
                f"{config.source}: {field} is {heads} and decoder_num_attention_heads {sizes.num_heads}: Moonshine is "
                "served where all of them are the same"
            )
    encoder_act = hidden_act(config.named(hidden_act="encoder_hidden_act"), default="gelu", acts=ACTIVATIONS)

    of_encoder = _attention(sizes, "self_attn", _has_bias(config), rope=sizes.rope, interleaved=True)
    norm = partial(sizes.layer_norm, has_bias=False)
    return moonshine_network(
        sizes,
        config,
        kind=MoonshineSpec,
        sound_convolutions=_CONVOLUTIONS,
        sound_width=_SAMPLES + 4 * (_SAMPLES // _CONVOLUTIONS[0].stride) * sizes.hidden_size,
        max_encoder_len=num_sound_tokens(_CONVOLUTIONS, MAX_SAMPLES),
        encoder_layers=tuple(
            LayerSpec(
                name=f"model.encoder.layers.{number}",
                mixers=(of_encoder,),
                input_norm=norm("input_layernorm"),
                feed_forward=sizes.mlp(act=encoder_act),
                feed_forward_norm=norm("post_attention_layernorm"),
            )
            for number in range(config.integer("encoder_num_hidden_layers", minimum=1))
        ),
        encoder_norm=norm("layer_norm"),
    )


def _has_bias(config: Fields) -> bool:
    """Whether queries, keys and values have biases."""
    return config.flag("attention_bias", default=False)


def moonshine_network(
    sizes: DecoderSizes, config: Fields, *, renamed: tuple[tuple[str, str], ...] = (), **encoder: Any
) -> NetworkSpec:
    """A network with the decoder that all of the family have.

    Args:
        sizes: The decoder's.
        config: The whole of config.json.
        renamed: As in `CheckpointNames`.
        encoder: Fields of `EncoderDecoderSpec` that are the encoder's, and the class of the record.
    """
    norm, bias = partial(sizes.layer_norm, has_bias=False), _has_bias(config)
    own, cross = sizes.attention(qkv_bias=bias, interleaved=True), _attention(sizes, "encoder_attn", bias)
    gated = sizes.gated_mlp(names=("gate_proj", "up_proj", "fc2"), bias=True)
    rows = (("up_proj", sizes.intermediate_size), ("gate_proj", sizes.intermediate_size))
    names = tuple(f"model.decoder.layers.{number}" for number in sizes.layers)
    return sizes.network(
        (
            CrossLayerSpec(
                name=name,
                mixers=(own,),
                input_norm=norm("input_layernorm"),
                cross=cross,
                cross_norm=norm("post_attention_layernorm"),
                feed_forward=gated,
                feed_forward_norm=norm("final_layernorm"),
            )
            for name in names
        ),
        decoder_start_token_ids=start_token_ids(config, (1,)),
        shared="model.decoder.embed_tokens",
        body="model.decoder",
        embedding=sizes.embedding(),
        final_norm=norm("norm"),
        encoder_body="model.encoder",
        encoder_embedding=sizes.embedding(),
        head=HeadSpec(name="proj_out", tied=sizes.tied),
        checkpoint=CheckpointNames(
            ignored_suffixes=("proj_out.weight",) if sizes.tied else (),
            renamed=renamed,
            fused=tuple(FusedRows(module=f"{name}.mlp.fc1", parts=rows) for name in names),
        ),
        **encoder,
    )


def _attention(sizes: DecoderSizes, name: str, bias: bool, **fields: Any) -> EncoderAttentionSpec:
    return sizes.encoder_attention(name, bias=bias, names=LLAMA_NAMES, unbiased=(LLAMA_NAMES.out,), **fields)
