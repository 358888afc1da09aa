"""Bloom's config.json."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import decoder_fields

__all__ = ["read_config"]


def read_config(config: Fields) -> ModelConfig:
    """Biases everywhere, and a norm behind the embedding."""
    config.fixed("apply_residual_connection_post_layernorm", False)
    named = config.named(
        num_attention_heads="n_head",
        num_hidden_layers="n_layer",
        max_position_embeddings="seq_length",
        intermediate_size="-",
        hidden_act="-",
        rms_norm_eps="layer_norm_epsilon",
        num_key_value_heads="-",
    )
    values = decoder_fields(named, tied=True, act="gelu_new", eps=1e-5, rotary=False, inner_factor=4, context=2048)
    values |= {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True, "mlp_gated": False, "norm_bias": True}
    return ModelConfig(**values, alibi=True, other_parameters=2 * values["hidden_size"])
