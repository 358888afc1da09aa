"""Moonshine Streaming (Kudlur et al. 2026, "Moonshine v2: Ergodic Streaming Encoder ASR for Latency-Critical Speech
Applications"): an encoder whose tokens see the few before them, and fewer behind them, and Moonshine's decoder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import ACTIVATIONS, GATED_ACTS
from quire_models.decoder_sizes import decoder_sizes
from quire_models.encoder_spec import EncoderDecoderSpec
from quire_models.families.moonshine import MAX_SAMPLES, moonshine_network
from quire_models.mixer_spec import LLAMA_NAMES
from quire_models.spec import (
    LayerSpec,
    LinearSpec,
    NetworkSpec,
    PositionSpec,
    SampleConvolution,
    Weight,
    num_sound_tokens,
)

__all__ = ["MoonshineStreamingSpec", "spec"]

_SAMPLES_PER_S = 16_000
_POSITIONS = 4096
_CONVOLUTION = SampleConvolution(5, 2, padding=4)
"""Causal: all of its padding stands before the sound."""
_ENCODER = {
    "hidden_size": 320,
    "intermediate_size": 1280,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "sliding_windows": [[16, 4], [16, 4], [16, 0], [16, 0], [16, 4], [16, 4]],
    "vocab_size": 1,  # it reads no tokens
}
"""What its encoder_config leaves out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoonshineStreamingSpec(EncoderDecoderSpec):
    """A network whose encoder reads frames of samples, and may be narrower or wider than the decoder."""

    encoder_hidden_size: int
    encoder_intermediate_size: int
    """Width of its feed-forward networks."""
    frame_len: int
    """Samples of a frame."""
    positions: PositionSpec
    """What is added to the encoder's output, before the projection."""
    projection: LinearSpec | None
    """From the encoder's width to the decoder's, by its full name; None where both are as wide."""
    built_by: ClassVar[str] = "quire_models.families.moonshine_streaming_layers:MoonshineStreaming"

    @property
    def embedder_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name within `model.encoder.embedder` -> shape of what makes tokens of frames."""
        hidden, width = self.encoder_hidden_size, _CONVOLUTION.width
        return {
            "comp.log_k": (),
            "linear.weight": (hidden, self.frame_len),
            "conv1.weight": (2 * hidden, hidden, width),
            "conv1.bias": (2 * hidden,),
            "conv2.weight": (hidden, 2 * hidden, width),
            "conv2.bias": (hidden,),
        }

    @property
    def inner_width(self) -> int:
        """Most numbers that a part of a layer keeps per token while it runs, in either stack."""
        return 3 * max(self.intermediate_size, self.encoder_intermediate_size)

    def weights(self) -> Iterator[Weight]:
        """All parameters by their full names, but the table of tokens."""
        yield from EncoderDecoderSpec.weights(self)
        for name, shape in self.embedder_shapes.items():
            yield Weight(f"model.encoder.embedder.{name}", shape, "embedding")
        yield from self.positions.weights()
        if self.projection is not None:
            yield from self.projection.weights("attention")


def spec(config: Fields) -> NetworkSpec:
    """The decoder is Moonshine's, with positions in eight tenths of each head; the encoder has none, and its norms have
    weights that are stored as their distance from one."""
    named = config.named(rms_norm_eps="-")
    sizes = decoder_sizes(named, act="silu", acts=GATED_ACTS, partial=0.8, eps=1e-5, context=_POSITIONS)
    if sizes.num_kv_heads != sizes.num_heads:
        raise CheckpointError(
            f"{config.source}: num_key_value_heads is {sizes.num_kv_heads} and num_attention_heads {sizes.num_heads}: "
            "Moonshine Streaming is served where both are the same"
        )
    fields = config.object("encoder_config") or Fields({}, f"{config.source}: encoder_config")
    for field, value in _ENCODER.items():
        fields = fields.with_default(field, value)
    fields.fixed("sample_rate", _SAMPLES_PER_S)
    encoder = decoder_sizes(
        fields.named(rms_norm_eps="-"), act="gelu", acts=ACTIVATIONS, eps=1e-5, rotary=False, context=_POSITIONS
    )
    frame_len = round(_SAMPLES_PER_S * fields.number("frame_ms", default=5.0, above=0.0) / 1000)
    if frame_len < 1:
        raise CheckpointError(f"{fields.source}: frame_ms must be at least one sample of {_SAMPLES_PER_S} a second")
    convolutions = (SampleConvolution(frame_len, frame_len, padding=frame_len - 1), _CONVOLUTION, _CONVOLUTION)
    own = encoder.encoder_attention("self_attn", bias=fields.flag("attention_bias", default=False), names=LLAMA_NAMES)
    norm = partial(encoder.layer_norm, has_bias=False, offset=1.0)
    projection = LinearSpec(name="model.decoder.proj", in_features=encoder.hidden_size, out_features=sizes.hidden_size)
    return moonshine_network(
        sizes,
        config,
        renamed=((".gamma", ".weight"),),
        kind=MoonshineStreamingSpec,
        sound_convolutions=convolutions,
        max_encoder_len=min(num_sound_tokens(convolutions, MAX_SAMPLES), sizes.max_model_len),
        sound_width=4 * max(6 * frame_len, 7 * encoder.hidden_size),  # four frames, which are scaled in float32
        encoder_hidden_size=encoder.hidden_size,
        encoder_intermediate_size=encoder.intermediate_size,
        frame_len=frame_len,
        positions=PositionSpec(
            name="model.decoder.pos_emb",
            num_positions=config.integer("max_position_embeddings", default=_POSITIONS, minimum=1),
            size=encoder.hidden_size,
        ),
        projection=None if encoder.hidden_size == sizes.hidden_size else projection,
        encoder_layers=tuple(
            LayerSpec(
                name=f"model.encoder.layers.{number}",
                mixers=(replace(own, sliding_window=before, look_ahead=after),),
                input_norm=norm("input_layernorm"),
                feed_forward=encoder.mlp(),
                feed_forward_norm=norm("post_attention_layernorm"),
            )
            for number, (before, after) in enumerate(_windows(fields, encoder.num_layers))
        ),
        encoder_norm=norm("final_norm"),
    )


def _windows(fields: Fields, num_layers: int) -> list[tuple[int, int]]:
    """Tokens before a token, and behind it, that it sees in each layer. config.json counts the token itself in both, if
    there are any."""
    windows = fields.get("sliding_windows")
    if not isinstance(windows, list) or len(windows) < num_layers or not all(map(_is_window, windows)):
        raise CheckpointError(
            f"{fields.source}: sliding_windows must have two numbers for each of {num_layers} layers, the first of "
            f"them at least 1, is {windows!r}"
        )
    return [(before - 1, max(0, after - 1)) for before, after in windows[:num_layers]]


def _is_window(value: Any) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2 and all(type(number) is int for number in value)
    return is_pair and value[0] >= 1 and value[1] >= 0
