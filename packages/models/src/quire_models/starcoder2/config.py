"""StarCoder2's config.json."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import ACTIVATIONS, decoder_fields, layer_windows

__all__ = ["read_config"]


def read_config(config: Fields) -> ModelConfig:
    """Biases everywhere or nowhere; one window for all layers."""
    bias = config.flag("use_bias", default=True)
    named = config.named(rms_norm_eps="norm_epsilon")
    values = decoder_fields(named, tied=True, act="gelu_pytorch_tanh", acts=ACTIVATIONS, eps=1e-5)
    values |= {"qkv_bias": bias, "attention_out_bias": bias, "mlp_bias": bias, "mlp_gated": False, "norm_bias": True}
    return ModelConfig(**{**values, "sliding_windows": layer_windows(config, values["num_layers"])})
