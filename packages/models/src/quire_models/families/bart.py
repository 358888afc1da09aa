"""BART (Lewis et al. 2019) and mBART (Liu et al. 2020): an encoder and a decoder with learned positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import ACTIVATIONS
from quire_models.decoder_sizes import decoder_sizes
from quire_models.encoder_spec import CrossLayerSpec, EncoderAttentionSpec, EncoderDecoderSpec, start_token_ids
from quire_models.mixer_spec import BART_NAMES
from quire_models.spec import CheckpointNames, HeadSpec, LayerSpec, MixerSpec, NetworkSpec

__all__ = ["POSITION_OFFSET", "spec", "spec_of_mbart"]

POSITION_OFFSET = 2
"""Rows of the tables of positions that are not used."""


def spec(config: Fields) -> NetworkSpec:
    """Norms stand behind the sums."""
    return _network(config, norms_first=False)


def spec_of_mbart(config: Fields) -> NetworkSpec:
    """Norms stand before the parts, and one behind each stack."""
    return _network(config, norms_first=True)


def _network(config: Fields, *, norms_first: bool) -> NetworkSpec:
    """Learned positions in both stacks, biases everywhere, one embedding for both and for the logits."""
    config.fixed("tie_word_embeddings", True)
    named = config.named(
        hidden_size="d_model",
        num_attention_heads="decoder_attention_heads",
        num_hidden_layers="decoder_layers",
        intermediate_size="decoder_ffn_dim",
        hidden_act="activation_function",
        num_key_value_heads="-",
        rms_norm_eps="-",
    )
    sizes = decoder_sizes(named, tied=True, act="gelu", acts=ACTIVATIONS, eps=1e-5, rotary=False, context=1024)
    hidden, heads = sizes.hidden_size, config.integer("encoder_attention_heads", default=sizes.num_heads, minimum=1)
    if hidden % heads:
        raise CheckpointError(
            f"{config.source}: d_model ({hidden}) must be a multiple of encoder_attention_heads ({heads})"
        )
    num_encoder_layers = config.integer("encoder_layers", minimum=1)
    encoder_inner = config.integer("encoder_ffn_dim", minimum=1)
    embedding = sizes.embedding(
        factor=hidden**0.5 if config.flag("scale_embedding", default=False) else 1.0,
        positions=sizes.positions("embed_positions", POSITION_OFFSET),
        norm=sizes.layer_norm("layernorm_embedding"),
    )

    def parts(name: str, mixer: MixerSpec, inner: int) -> dict[str, Any]:
        """Fields of a layer; norms are called alike wherever they stand."""
        attention_norm, mlp_norm = (sizes.layer_norm(f"{each}_layer_norm") for each in ("self_attn", "final"))
        norms = {"attention_out_norm": attention_norm, "feed_forward_out_norm": mlp_norm, "arrangement": "post_ln"}
        if norms_first:
            norms = {"input_norm": attention_norm, "feed_forward_norm": mlp_norm}
        mlp = sizes.mlp("", intermediate_size=inner)
        return {"name": name, "mixers": (mixer,), "feed_forward": mlp, **norms}

    def attention(name: str, num_heads: int) -> EncoderAttentionSpec:
        of_heads = replace(sizes, num_heads=num_heads, num_kv_heads=num_heads, head_dim=hidden // num_heads)
        return of_heads.encoder_attention(name, bias=True)

    decoder, of_encoder = sizes.attention(bias=True, names=BART_NAMES), attention("self_attn", heads)
    cross, cross_norm = attention("encoder_attn", sizes.num_heads), sizes.layer_norm("encoder_attn_layer_norm")
    return sizes.network(
        (
            CrossLayerSpec(
                **parts(f"model.decoder.layers.{layer}", decoder, sizes.intermediate_size),
                cross=cross,
                cross_norm=cross_norm,
            )
            for layer in sizes.layers
        ),
        kind=EncoderDecoderSpec,
        max_encoder_len=sizes.max_model_len,
        decoder_start_token_ids=start_token_ids(config, config.token_ids("bos_token_id")[:1]),
        shared="model.shared",
        body="model.decoder",
        embedding=embedding,
        final_norm=sizes.layer_norm("layer_norm") if norms_first else None,
        encoder_body="model.encoder",
        encoder_embedding=embedding,
        encoder_layers=tuple(
            LayerSpec(**parts(f"model.encoder.layers.{layer}", of_encoder, encoder_inner))
            for layer in range(num_encoder_layers)
        ),
        encoder_norm=sizes.layer_norm("layer_norm") if norms_first else None,
        head=HeadSpec(tied=True, bias=True, is_bias_buffer=True),
        checkpoint=CheckpointNames(
            ignored_suffixes=("coder.embed_tokens.weight",),
            renamed=(("final_logits_bias", "lm_head.bias"),),
            squeezed=("lm_head.bias",),
        ),
    )
