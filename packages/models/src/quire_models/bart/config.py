"""BART's config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire_interfaces import CheckpointError, Fields
from quire_models.config import start_token_ids
from quire_models.config_fields import ACTIVATIONS, decoder_fields
from quire_models.encoder_config import EncoderDecoderConfig, encoder_weights
from quire_models.mixer_shapes import WeightCount

__all__ = ["POSITION_OFFSET", "BartConfig", "bart_fields", "read_config"]

POSITION_OFFSET = 2
"""Rows of the tables of positions that are not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BartConfig(EncoderDecoderConfig):
    """BART or mBART."""

    embedding_scale: float
    """Factor of the tokens' embeddings."""
    norms_first: bool
    """Norms stand before the parts, and one behind each stack (mBART); else behind each part's addition (BART)."""


def bart_fields(config: Fields, *, norms_first: bool) -> BartConfig:
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
    values = decoder_fields(named, tied=True, act="gelu", acts=ACTIVATIONS, eps=1e-5, rotary=False, context=1024)
    values |= {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True, "mlp_gated": False, "norm_bias": True}
    hidden, length = values["hidden_size"], values["max_model_len"]
    heads = config.integer("encoder_attention_heads", default=values["num_heads"], minimum=1)
    if hidden % heads:
        raise CheckpointError(
            f"{config.source}: d_model ({hidden}) must be a multiple of encoder_attention_heads ({heads})"
        )
    own: dict[str, Any] = {
        "num_encoder_layers": config.integer("encoder_layers", minimum=1),
        "encoder_intermediate_size": config.integer("encoder_ffn_dim", minimum=1),
        "encoder_num_heads": heads,
    }
    num_norms = 3 * values["num_layers"] + 2 * own["num_encoder_layers"] + 2 + 2 * norms_first
    weights = encoder_weights(values, own, gated=False, bias=True) | {
        "norms": WeightCount(others=2 * hidden * num_norms),
        "positions": WeightCount(others=2 * (length + POSITION_OFFSET) * hidden),
    }
    return BartConfig(
        **values,
        **own,
        weights=weights,
        max_encoder_len=length,
        decoder_start_token_ids=start_token_ids(config, config.token_ids("bos_token_id")[:1]),
        embedding_scale=hidden**0.5 if config.flag("scale_embedding", default=False) else 1.0,
        norms_first=norms_first,
    )


def read_config(config: Fields) -> BartConfig:
    """Norms stand behind the parts."""
    return bart_fields(config, norms_first=False)
