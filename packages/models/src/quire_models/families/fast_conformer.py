"""Fast Conformer (Rekesh et al. 2023, "Fast Conformer with Linearly Scalable Attention for Efficient Speech
Recognition"): the encoder of Canary, Cohere ASR and Parakeet, and the decoder that the first two have behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import ACTIVATIONS, hidden_act
from quire_models.decoder_sizes import DecoderSizes
from quire_models.encoder_spec import CrossLayerSpec, EncoderAttentionSpec, EncoderDecoderSpec
from quire_models.feed_forward_spec import MLPSpec
from quire_models.mixer_spec import LLAMA_NAMES
from quire_models.spec import (
    CheckpointNames,
    HeadSpec,
    LinearSpec,
    NetworkSpec,
    NormSpec,
    PositionSpec,
    SampleConvolution,
    Weight,
    inside,
    num_sound_tokens,
)

__all__ = ["ConformerDecoderSpec", "FastConformerSpec", "conformer_decoder", "fast_conformer"]

FRAMES_PER_S = 100
_EPS = 1e-5
_LAYER_NORMS = ("norm_feed_forward1", "norm_self_att", "norm_conv", "norm_feed_forward2", "norm_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class FastConformerSpec:
    """Frames of mel bins -> a hidden state for every `2 ** num_convolutions` of them."""

    name: str = "model.encoder"
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_mel_bins: int
    num_convolutions: int
    """Convolutions over frames and bins that halve both."""
    channels: int
    """Of these convolutions."""
    width: int
    """Of them, in frames and in bins; odd."""
    layer_width: int
    """Frames that the convolution of a layer is wide; odd."""
    scales_input: bool
    """What the convolutions give is multiplied with the root of `hidden_size`."""
    act: str
    """A name of `quire_models.config_fields.HIDDEN_ACTS`, right-hand side."""
    bias: bool
    """Of linear layers."""
    convolution_bias: bool
    """Of the convolutions of layers."""

    @property
    def convolution_shapes(self) -> tuple[tuple[int, tuple[int, int, int, int]], ...]:
        """(place in the checkpoint, shape of the weight) of each convolution before the layers: one of all bins, then
        pairs of one channel by channel and one of single frames and bins."""
        channels, width = self.channels, self.width
        shapes = [(0, (channels, 1, width, width))]
        for pair in range(self.num_convolutions - 1):
            shapes += [(2 + 3 * pair, (channels, 1, width, width)), (3 + 3 * pair, (channels, channels, 1, 1))]
        return tuple(shapes)

    @property
    def subsampled_size(self) -> int:
        """Numbers that the convolutions make of a token's frames."""
        return self.channels * (self.num_mel_bins >> self.num_convolutions)

    @property
    def sound_width(self) -> int:
        """Most numbers alive per token of a sound while the convolutions read it: what the first one writes, which the
        second lays out anew, and what that writes, a quarter as much."""
        read = self.num_mel_bins << self.num_convolutions
        return read * (2 + self.channels * 9 // 16)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def attention(self) -> EncoderAttentionSpec:
        """The projections of a layer's attention."""
        return EncoderAttentionSpec(
            name="self_attn",
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            bias=self.bias,
            names=LLAMA_NAMES,
        )

    def feed_forward(self, name: str) -> MLPSpec:
        """One of the two of a layer."""
        return MLPSpec(
            name=name,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            act=self.act,
            bias=self.bias,
            names=("linear1", "linear2"),
        )

    def norms(self) -> tuple[NormSpec, ...]:
        """Layer norms of a layer: before its four parts, and behind them."""
        return tuple(
            NormSpec(name=name, size=self.hidden_size, eps=_EPS, kind="layer", has_bias=True) for name in _LAYER_NORMS
        )

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name within a layer -> shape of what is neither a linear layer nor a layer norm."""
        hidden, heads = self.hidden_size, (self.num_heads, self.head_dim)
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.relative_k_proj.weight": (hidden, hidden),
            "self_attn.bias_u": heads,
            "self_attn.bias_v": heads,
        }
        convolutions = {
            "pointwise_conv1": (2 * hidden, hidden, 1),
            "depthwise_conv": (hidden, 1, self.layer_width),
            "pointwise_conv2": (hidden, hidden, 1),
        }
        for name, shape in convolutions.items():
            shapes[f"conv.{name}.weight"] = shape
            if self.convolution_bias:
                shapes[f"conv.{name}.bias"] = shape[:1]
        return shapes | {f"conv.norm.{name}": (hidden,) for name in ("weight", "bias", "running_mean", "running_var")}

    def weights(self) -> Iterator[Weight]:
        """All parameters by their full names."""
        outer = f"{self.name}.subsampling"
        for number, shape in self.convolution_shapes:
            yield Weight(f"{outer}.layers.{number}.weight", shape, "embedding")
            yield Weight(f"{outer}.layers.{number}.bias", shape[:1], "embedding")
        yield Weight(f"{outer}.linear.weight", (self.hidden_size, self.subsampled_size), "embedding")
        yield Weight(f"{outer}.linear.bias", (self.hidden_size,), "embedding")
        parts: list[Any] = [self.attention, self.feed_forward("feed_forward1"), self.feed_forward("feed_forward2")]
        for number in range(self.num_layers):
            name = f"{self.name}.layers.{number}"
            for part in [*parts, *self.norms()]:
                yield from inside(name, part.weights())
            for each, sizes in self.layer_shapes().items():
                # What is put together with the norm is taken in float32.
                is_wide = each.startswith("conv.") and "pointwise" not in each
                yield Weight(f"{name}.{each}", sizes, "attention", is_wide=is_wide, is_buffer="running" in each)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformerDecoderSpec(EncoderDecoderSpec):
    """A decoder that attends to what a Fast Conformer makes of a sound."""

    conformer: FastConformerSpec
    projection: LinearSpec | None
    """From the encoder's width to the decoder's, by its full name; None where both are as wide."""
    built_by: ClassVar[str] = "quire_models.families.fast_conformer_layers:ConformerDecoder"

    @property
    def inner_width(self) -> int:
        """Most numbers that a part of a layer keeps per token while it runs, in either stack."""
        return 3 * max(self.intermediate_size, self.conformer.intermediate_size)

    def weights(self) -> Iterator[Weight]:
        """All parameters by their full names, but the tables of embedding and head."""
        yield from EncoderDecoderSpec.weights(self)
        yield from self.conformer.weights()
        if self.projection is not None:
            yield from self.projection.weights("attention")


def fast_conformer(config: Fields, defaults: Mapping[str, Any], name: str = "model.encoder") -> FastConformerSpec:
    """The encoder that `encoder_config` of a checkpoint's config.json describes.

    Args:
        config: The whole of config.json.
        defaults: Of fields in which the class differs from Parakeet's.
        name: The encoder's, in the checkpoint.

    Raises:
        CheckpointError: a field is missing, wrong, or of a network that is not built.
    """
    fields = config.object("encoder_config") or Fields({}, f"{config.source}: encoder_config")
    parakeet = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_mel_bins": 80}
    for field, value in {**parakeet, **defaults}.items():
        fields = fields.with_default(field, value)
    fields.fixed("subsampling_conv_stride", 2)

    def integer(field: str, default: int) -> int:
        return fields.integer(field, default=default, minimum=1)

    hidden, heads = integer("hidden_size", 0), integer("num_attention_heads", 8)
    bins, factor = integer("num_mel_bins", 0), integer("subsampling_factor", 8)
    width, layer_width = integer("subsampling_conv_kernel_size", 3), integer("conv_kernel_size", 9)
    if hidden % (2 * heads):
        raise CheckpointError(
            f"{fields.source}: hidden_size ({hidden}) must be a multiple of twice num_attention_heads ({heads})"
        )
    if factor < 2 or factor & (factor - 1) or bins % factor:
        raise CheckpointError(
            f"{fields.source}: subsampling_factor ({factor}) must be a power of two that divides num_mel_bins ({bins})"
        )
    if not width % 2 or not layer_width % 2:
        raise CheckpointError(
            f"{fields.source}: subsampling_conv_kernel_size ({width}) and conv_kernel_size ({layer_width}) must be odd"
        )
    return FastConformerSpec(
        name=name,
        hidden_size=hidden,
        intermediate_size=integer("intermediate_size", 0),
        num_layers=integer("num_hidden_layers", 0),
        num_heads=heads,
        num_mel_bins=bins,
        num_convolutions=factor.bit_length() - 1,
        channels=integer("subsampling_conv_channels", 256),
        width=width,
        layer_width=layer_width,
        scales_input=fields.flag("scale_input", default=True),
        act=hidden_act(fields, default="silu", acts=ACTIVATIONS),
        bias=fields.flag("attention_bias", default=True),
        convolution_bias=fields.flag("convolution_bias", default=True),
    )


def halvings(conformer: FastConformerSpec) -> tuple[SampleConvolution, ...]:
    """How frames become tokens: with their padding, the convolutions take every second frame from the first."""
    return (SampleConvolution(1, 2),) * conformer.num_convolutions


def conformer_decoder(
    sizes: DecoderSizes,
    conformer: FastConformerSpec,
    *,
    bias: bool,
    positions: PositionSpec,
    projection: LinearSpec | None,
    start_token_ids: tuple[int, ...],
    longest_s: int,
    **names: Any,
) -> NetworkSpec:
    """The network of a Fast Conformer with a decoder: layer norms stand before the parts, and behind the embedding.

    Args:
        sizes: The decoder's.
        bias: Of its attention.
        longest_s: Seconds of the longest sound that the network reads.
        names: Fields of `CheckpointNames`.
    """
    norm, convolutions = sizes.layer_norm, halvings(conformer)
    embedding = sizes.embedding(positions=positions, norm=norm("embedding_layernorm"))
    own, cross = sizes.attention(bias=bias), sizes.encoder_attention("encoder_attn", bias=bias, names=LLAMA_NAMES)
    return sizes.network(
        (
            CrossLayerSpec(
                name=f"model.decoder.layers.{number}",
                mixers=(own,),
                input_norm=norm("input_layernorm"),
                cross=cross,
                cross_norm=norm("post_attention_layernorm"),
                feed_forward=sizes.mlp(),
                feed_forward_norm=norm("final_layernorm"),
            )
            for number in sizes.layers
        ),
        kind=ConformerDecoderSpec,
        conformer=conformer,
        projection=projection,
        sound_convolutions=convolutions,
        sound_bins=conformer.num_mel_bins,
        sound_width=conformer.sound_width,
        max_encoder_len=num_sound_tokens(convolutions, longest_s * FRAMES_PER_S),
        decoder_start_token_ids=start_token_ids,
        shared="model.decoder.embed_tokens",
        body="model.decoder",
        embedding=embedding,
        final_norm=norm("norm"),
        encoder_body=conformer.name,
        encoder_embedding=sizes.embedding(),
        encoder_layers=(),
        encoder_norm=None,
        head=HeadSpec(name="proj_out", tied=sizes.tied, bias=True),
        checkpoint=CheckpointNames(
            ignored_prefixes=("preprocessor.featurizer.",),
            ignored_suffixes=(".num_batches_tracked", *(("proj_out.weight",) if sizes.tied else ())),
            **names,
        ),
    )
