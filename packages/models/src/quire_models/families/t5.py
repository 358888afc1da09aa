"""T5 (Raffel et al. 2020), mT5, UMT5 and Flan-T5: positions come as biases of attention scores, by distance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import ACTIVATIONS, GATED_ACTS, HIDDEN_ACTS
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.encoder_spec import (
    CrossLayerSpec,
    DistanceBiasSpec,
    EncoderAttentionSpec,
    EncoderDecoderSpec,
    start_token_ids,
)
from quire_models.mixer_spec import ProjectionNames, SelfAttentionSpec
from quire_models.spec import (
    CheckpointNames,
    FeedForwardSpec,
    HeadSpec,
    LayerSpec,
    NetworkSpec,
    Weight,
    recast,
)

__all__ = [
    "CONTEXT_TOKENS",
    "NAMES",
    "T5Spec",
    "spec",
    "spec_of_encoder",
    "spec_of_mt5",
    "spec_of_mt5_encoder",
    "spec_of_umt5",
    "spec_of_umt5_encoder",
]

CONTEXT_TOKENS = 512
"""Length of the texts that T5 was trained on, for checkpoints that name none."""
NAMES = ProjectionNames("q", "k", "v", "o")


@dataclass(frozen=True, slots=True, kw_only=True)
class T5SelfAttentionSpec(SelfAttentionSpec):
    """Self-attention of the decoder, whose scores have biases by distance."""

    splits_heads: ClassVar[bool] = True
    built_by: ClassVar[str] = "quire_models.families.t5_layers:T5SelfAttention"
    score_copies: ClassVar[int] = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Spec(EncoderDecoderSpec):
    """T5 or one of its successors."""

    num_buckets: int
    """Number of ranges of distances, each with a bias of its own."""
    max_distance: int
    """From here on all distances are in one bucket."""
    has_bias_in_every_layer: bool
    """Every layer has its own biases of distances (UMT5); else the first layer of each stack has those of all."""
    built_by: ClassVar[str] = "quire_models.families.t5_layers:T5ForConditionalGeneration"

    def weights(self) -> Iterator[Weight]:
        """Those of any network with an encoder, and the biases."""
        yield from EncoderDecoderSpec.weights(self)
        for stack in (self.encoder_layers, self.layers):
            for layer in stack if self.has_bias_in_every_layer else stack[:1]:
                name = f"{layer.name}.layer.0.SelfAttention.relative_attention_bias.weight"
                yield Weight(name, (self.num_buckets, self.attention.num_heads), "attention")


def spec(config: Fields) -> NetworkSpec:
    """The first T5 scales what its LM head gets; T5 1.1 and Flan-T5 do not."""
    return _network(config, scales_logits=None)


def spec_of_mt5(config: Fields) -> NetworkSpec:
    """As T5 1.1, in other words for the same defaults."""
    return _network(config.with_default("feed_forward_proj", "gated-gelu"), scales_logits=False)


def spec_of_umt5(config: Fields) -> NetworkSpec:
    """Every layer has its own biases of distances."""
    gated = config.with_default("feed_forward_proj", "gated-gelu")
    return _network(gated, scales_logits=True, has_bias_in_every_layer=True)


def spec_of_encoder(config: Fields) -> NetworkSpec:
    """The encoder of T5 alone."""
    return _encoder(config)


def spec_of_mt5_encoder(config: Fields) -> NetworkSpec:
    """The encoder of mT5 alone."""
    return _encoder(config.with_default("feed_forward_proj", "gated-gelu"))


def spec_of_umt5_encoder(config: Fields) -> NetworkSpec:
    """The encoder of UMT5 alone, whose every layer has its own biases of distances."""
    return _encoder(config.with_default("feed_forward_proj", "gated-gelu"), has_bias_in_every_layer=True)


def _network(config: Fields, *, scales_logits: bool | None, has_bias_in_every_layer: bool = False) -> NetworkSpec:
    """No biases of linear layers, RMS norms before the parts.

    Args:
        scales_logits: Whether hidden states are scaled before the LM head; None where config.json says it.
    """
    num_encoder_layers = config.integer("num_layers", minimum=1)
    sizes, is_gated = _sizes(config, num_encoder_layers)
    if scales_logits is None:
        scales_logits = config.flag("scale_decoder_outputs", default=sizes.tied)
    elif scales_logits:
        scales_logits = sizes.tied

    own_attention = recast(T5SelfAttentionSpec, sizes.attention(name="layer.0.SelfAttention", scale=1.0, names=NAMES))
    first, second, third = (sizes.rms_norm(f"layer.{part}.layer_norm") for part in range(3))
    return sizes.network(
        (
            CrossLayerSpec(
                name=f"decoder.block.{layer}",
                mixers=(own_attention,),
                input_norm=first,
                cross=_attention(sizes, "layer.1.EncDecAttention"),
                cross_norm=second,
                feed_forward=_feed_forward(sizes, "layer.2.DenseReluDense", is_gated=is_gated),
                feed_forward_norm=third,
            )
            for layer in sizes.layers
        ),
        kind=T5Spec,
        max_encoder_len=sizes.max_model_len,
        has_positions_without_end=True,
        decoder_start_token_ids=start_token_ids(config, config.token_ids("pad_token_id")[:1]),
        shared="shared",
        body="decoder",
        final_norm="final_layer_norm",
        encoder_body="encoder",
        encoder_embedding=sizes.embedding(),
        encoder_layers=_encoder_layers(sizes, num_encoder_layers, is_gated=is_gated),
        encoder_norm=sizes.rms_norm("final_layer_norm"),
        head=HeadSpec(
            tied=sizes.tied, may_differ=True, hidden_factor=sizes.hidden_size**-0.5 if scales_logits else 1.0
        ),
        checkpoint=CheckpointNames(
            ignored_suffixes=("coder.embed_tokens.weight", "EncDecAttention.relative_attention_bias.weight")
        ),
        num_buckets=config.integer("relative_attention_num_buckets", default=32, minimum=4),
        max_distance=config.integer("relative_attention_max_distance", default=128, minimum=2),
        has_bias_in_every_layer=has_bias_in_every_layer,
    )


def _encoder(config: Fields, *, has_bias_in_every_layer: bool = False) -> NetworkSpec:
    """The encoder alone, as embedding models have it."""
    num_layers = config.integer("num_layers", minimum=1)
    sizes, is_gated = _sizes(config, num_layers)
    layers = _encoder_layers(sizes, num_layers, is_gated=is_gated)
    with_bias = layers if has_bias_in_every_layer else layers[:1]
    bias = DistanceBiasSpec(
        names=tuple(f"{layer.name}.layer.0.SelfAttention.relative_attention_bias" for layer in with_bias),
        num_heads=sizes.num_heads,
        num_buckets=config.integer("relative_attention_num_buckets", default=32, minimum=4),
        max_distance=config.integer("relative_attention_max_distance", default=128, minimum=2),
    )
    return sizes.encoder_network(
        layers,
        embedding=sizes.embedding("shared"),
        final_norm=sizes.rms_norm("encoder.final_layer_norm"),
        checkpoint=CheckpointNames(
            ignored_prefixes=("decoder.", "lm_head."),
            renamed=(("encoder.embed_tokens.weight", "shared.weight"),),
        ),
        distance_bias=bias,
    )


def _encoder_layers(sizes: DecoderSizes, num_layers: int, *, is_gated: bool) -> tuple[LayerSpec, ...]:
    return tuple(
        LayerSpec(
            name=f"encoder.block.{layer}",
            mixers=(_attention(sizes, "layer.0.SelfAttention"),),
            input_norm=sizes.rms_norm("layer.0.layer_norm"),
            feed_forward=_feed_forward(sizes, "layer.1.DenseReluDense", is_gated=is_gated),
            feed_forward_norm=sizes.rms_norm("layer.1.layer_norm"),
        )
        for layer in range(num_layers)
    )


def _attention(sizes: DecoderSizes, name: str) -> EncoderAttentionSpec:
    return sizes.encoder_attention(name, scale=1.0, bias=False, names=NAMES)


def _feed_forward(sizes: DecoderSizes, name: str, *, is_gated: bool) -> FeedForwardSpec:
    if is_gated:
        return sizes.gated_mlp(name, names=("wi_0", "wi_1", "wo"))
    return sizes.mlp(name, ("wi", "wo"), bias=False)


def _sizes(config: Fields, num_encoder_layers: int) -> tuple[DecoderSizes, bool]:
    """Sizes of the decoder, which has as many layers as the encoder where config.json does not say; and whether
    feed-forward networks have a gate."""
    form = config.text("feed_forward_proj", default="relu")
    is_gated = form.startswith("gated-")
    act = "gelu_new" if form == "gated-gelu" else form.removeprefix("gated-")
    acts = GATED_ACTS if is_gated else ACTIVATIONS
    if HIDDEN_ACTS.get(act) not in acts:
        choices = ", ".join(known for known, name in HIDDEN_ACTS.items() if name in acts)
        raise CheckpointError(
            f"{config.source}: feed_forward_proj {form!r} is not supported; supported: "
            f"{'gated- with one of ' if is_gated else ''}{choices}"
        )
    named = config.named(
        hidden_size="d_model",
        head_dim="d_kv",
        num_attention_heads="num_heads",
        num_hidden_layers="num_decoder_layers",
        intermediate_size="d_ff",
        hidden_act="-",
        num_key_value_heads="-",
        rms_norm_eps="layer_norm_epsilon",
        max_position_embeddings="n_positions",
    ).with_default("num_hidden_layers", num_encoder_layers)
    context = CONTEXT_TOKENS
    return decoder_sizes(named, tied=True, act=act, acts=acts, eps=1e-6, rotary=False, context=context), is_gated
