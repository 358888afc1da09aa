"""OPT's config.json."""

from __future__ import annotations

from quire_models.config import ModelConfig
from quire_models.config_fields import ACTIVATIONS, decoder_fields
from quire_models.fields import Fields

__all__ = ["POSITION_OFFSET", "read_config"]


POSITION_OFFSET = 2
"""Rows of the table of positions that are not used."""


def read_config(config: Fields) -> ModelConfig:
    """Norms stand before the parts, as in all sizes but 350M, which also embeds in fewer dimensions."""
    config.fixed("do_layer_norm_before", True)
    config.fixed("_remove_final_layer_norm", False)
    config.fixed("layer_norm_elementwise_affine", True)
    config.fixed("word_embed_proj_dim", config.get("hidden_size"))
    bias = config.flag("enable_bias", default=True)
    named = config.named(
        intermediate_size="ffn_dim", hidden_act="activation_function", rms_norm_eps="-", num_key_value_heads="-"
    )
    values = decoder_fields(named, tied=True, act="relu", acts=ACTIVATIONS, eps=1e-5, rotary=False)
    values |= {"qkv_bias": bias, "attention_out_bias": bias, "mlp_bias": bias, "mlp_gated": False, "norm_bias": True}
    positions = (values["max_model_len"] + POSITION_OFFSET) * values["hidden_size"]
    return ModelConfig(**values, other_parameters=positions)
