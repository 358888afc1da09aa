"""Whisper (Radford et al. 2022) and what was distilled from it (Gandhi et al. 2023): an encoder reads the spectrogram
of half a minute, and a decoder writes what is said in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import ACTIVATIONS
from quire_models.decoder_sizes import decoder_sizes
from quire_models.encoder_spec import CrossLayerSpec, EncoderAttentionSpec, EncoderDecoderSpec, start_token_ids
from quire_models.mixer_spec import BART_NAMES, SelfAttentionSpec
from quire_models.spec import CheckpointNames, HeadSpec, LayerSpec, MixerSpec, NetworkSpec, Weight
from quire_models.towers.tower_spec import ConvolutionSpec

__all__ = ["WhisperSpec", "spec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperSpec(EncoderDecoderSpec):
    """A network whose encoder reads spectrograms."""

    convolutions: tuple[ConvolutionSpec, ...]
    """From mel bins to the width of the stream; the last one makes a token of two frames."""
    act: str
    """Behind each of them."""
    encoder_positions: str
    """Full name of the table that is added to what they give."""
    built_by: ClassVar[str] = "quire_models.families.whisper_layers:WhisperForConditionalGeneration"

    def weights(self) -> Iterator[Weight]:
        """All parameters by their full names, but the table of tokens."""
        yield from EncoderDecoderSpec.weights(self)
        for each in self.convolutions:
            yield Weight(f"{each.name}.weight", (each.out_channels, each.in_channels, 3), "embedding")
            yield Weight(f"{each.name}.bias", (each.out_channels,), "embedding")
        yield Weight(f"{self.encoder_positions}.weight", (self.max_encoder_len, self.hidden_size), "embedding")


def spec(config: Fields) -> NetworkSpec:
    """Norms stand before the parts, keys have no biases, and the table of tokens is the LM head."""
    config.fixed("tie_word_embeddings", True)
    named = config.named(
        hidden_size="d_model",
        num_attention_heads="decoder_attention_heads",
        num_hidden_layers="decoder_layers",
        intermediate_size="decoder_ffn_dim",
        hidden_act="activation_function",
        max_position_embeddings="max_target_positions",
        num_key_value_heads="-",
        rms_norm_eps="-",
    )
    sizes = decoder_sizes(named, tied=True, act="gelu", acts=ACTIVATIONS, eps=1e-5, rotary=False, context=448)
    hidden, heads = sizes.hidden_size, config.integer("encoder_attention_heads", default=sizes.num_heads, minimum=1)
    if hidden % heads:
        raise CheckpointError(
            f"{config.source}: d_model ({hidden}) must be a multiple of encoder_attention_heads ({heads})"
        )
    num_encoder_layers = config.integer("encoder_layers", minimum=1)
    encoder_inner = config.integer("encoder_ffn_dim", minimum=1)
    num_mel_bins = config.integer("num_mel_bins", default=80, minimum=1)
    factor = hidden**0.5 if config.flag("scale_embedding", default=False) else 1.0

    def layer(name: str, mixer: MixerSpec, inner: int) -> dict[str, Any]:
        """Fields of a layer of either stack."""
        return {
            "name": name,
            "mixers": (mixer,),
            "feed_forward": sizes.mlp("", intermediate_size=inner),
            "input_norm": sizes.layer_norm("self_attn_layer_norm"),
            "feed_forward_norm": sizes.layer_norm("final_layer_norm"),
        }

    def attention(name: str, num_heads: int) -> EncoderAttentionSpec:
        of_heads = replace(sizes, num_heads=num_heads, num_kv_heads=num_heads, head_dim=hidden // num_heads)
        return of_heads.encoder_attention(name, bias=True, unbiased=(BART_NAMES.key,))

    own: SelfAttentionSpec = sizes.attention(bias=True, names=BART_NAMES, unbiased=(BART_NAMES.key,))
    of_encoder, cross = attention("self_attn", heads), attention("encoder_attn", sizes.num_heads)
    return sizes.network(
        (
            CrossLayerSpec(
                **layer(f"model.decoder.layers.{number}", own, sizes.intermediate_size),
                cross=cross,
                cross_norm=sizes.layer_norm("encoder_attn_layer_norm"),
            )
            for number in sizes.layers
        ),
        kind=WhisperSpec,
        num_mel_bins=num_mel_bins,
        max_encoder_len=config.integer("max_source_positions", default=1500, minimum=1),
        decoder_start_token_ids=start_token_ids(config, ()),
        shared="model.decoder.embed_tokens",
        body="model.decoder",
        embedding=sizes.embedding(factor=factor, positions=sizes.positions("embed_positions")),
        final_norm=sizes.layer_norm("layer_norm"),
        encoder_body="model.encoder",
        encoder_embedding=sizes.embedding(),
        encoder_layers=tuple(
            LayerSpec(**layer(f"model.encoder.layers.{number}", of_encoder, encoder_inner))
            for number in range(num_encoder_layers)
        ),
        encoder_norm=sizes.layer_norm("layer_norm"),
        convolutions=(
            ConvolutionSpec(name="model.encoder.conv1", in_channels=num_mel_bins, out_channels=hidden, stride=1),
            ConvolutionSpec(name="model.encoder.conv2", in_channels=hidden, out_channels=hidden, stride=2),
        ),
        act=sizes.act,
        encoder_positions="model.encoder.embed_positions",
        head=HeadSpec(name="proj_out", tied=True),
        checkpoint=CheckpointNames(ignored_suffixes=("proj_out.weight",)),
    )
