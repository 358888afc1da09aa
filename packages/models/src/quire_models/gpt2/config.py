"""GPT-2's config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import ACTIVATIONS, decoder_fields

__all__ = ["GPT2Config", "gpt2_fields", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Config(ModelConfig):
    """A network with learned positions."""

    scale_attn_weights: bool
    """Attention scores are divided by the root of head_dim."""
    scale_attn_by_inverse_layer_idx: bool
    """And by the number of the layer, from 1."""


def read_config(config: Fields) -> GPT2Config:
    """Biases everywhere; the context is as long as the table of positions."""
    config.fixed("add_cross_attention", False)
    values = gpt2_fields(config, act="gelu_new")
    return GPT2Config(
        **values,
        scale_attn_weights=config.flag("scale_attn_weights", default=True),
        scale_attn_by_inverse_layer_idx=config.flag("scale_attn_by_inverse_layer_idx", default=False),
    )


def gpt2_fields(config: Fields, *, act: str) -> dict[str, Any]:
    """What GPT-2 and StarCoder have in common."""
    named = config.named(
        hidden_size="n_embd",
        num_attention_heads="n_head",
        num_hidden_layers="n_layer",
        max_position_embeddings="n_positions",
        intermediate_size="n_inner",
        hidden_act="activation_function",
        rms_norm_eps="layer_norm_epsilon",
        num_key_value_heads="-",
    )
    values = decoder_fields(named, tied=True, act=act, acts=ACTIVATIONS, eps=1e-5, rotary=False, inner_factor=4)
    values |= {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True, "mlp_gated": False, "norm_bias": True}
    return {**values, "other_parameters": values["max_model_len"] * values["hidden_size"]}
