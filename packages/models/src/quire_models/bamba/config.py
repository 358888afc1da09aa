"""Bamba's config.json."""

from __future__ import annotations

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import decoder_fields
from quire_models.mixer_shapes import hybrid_mamba2
from quire_models.recurrent_config import HybridConfig, gated_mlp_weights, hybrid_fields

__all__ = ["read_config"]


def read_config(config: Fields) -> HybridConfig:
    """Half of each head is rotated, whatever the file says."""
    config.fixed("hidden_act", "silu", "swish")  # the mixers take it, too
    values = decoder_fields(config, partial=0.5)
    bias = config.flag("attention_bias", default=False)
    values |= {
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": config.flag("mlp_bias", default=False),
    }
    listed = config.get("attn_layer_indices") or []
    if not isinstance(listed, list) or any(type(layer) is not int for layer in listed):
        raise CheckpointError(f"{config.source}: attn_layer_indices must be a list of layers, is {listed!r}")
    attends = [layer in listed for layer in range(values["num_layers"])]
    fields = hybrid_fields(values, hybrid_mamba2(config, values), attends)
    fields["weights"]["MLP"] = gated_mlp_weights(
        values["hidden_size"], values["intermediate_size"], values["num_layers"], bias=values["mlp_bias"]
    )
    return HybridConfig(**fields)
