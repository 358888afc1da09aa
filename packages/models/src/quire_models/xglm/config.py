"""XGLM's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import CheckpointError, Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import ACTIVATIONS, decoder_fields

__all__ = ["XGLMConfig", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class XGLMConfig(ModelConfig):
    """A network that may scale its embedding."""

    scale_embedding: bool


def read_config(config: Fields) -> XGLMConfig:
    """Positions are computed; the epsilon of norms is always 1e-5."""
    config.fixed("add_cross_attention", False)
    named = config.named(
        hidden_size="d_model",
        num_attention_heads="attention_heads",
        num_hidden_layers="num_layers",
        intermediate_size="ffn_dim",
        hidden_act="activation_function",
        rms_norm_eps="-",
        num_key_value_heads="-",
    )
    values = decoder_fields(named, tied=True, act="gelu", acts=ACTIVATIONS, eps=1e-5, rotary=False)
    if values["hidden_size"] % 2:
        raise CheckpointError(f"{config.source}: d_model must be even, is {values['hidden_size']}")
    values |= {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True, "mlp_gated": False, "norm_bias": True}
    return XGLMConfig(**values, scale_embedding=config.flag("scale_embedding", default=True))
