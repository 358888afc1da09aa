"""OPT's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import ACTIVATIONS, decoder_fields

__all__ = ["POSITION_OFFSET", "OPTConfig", "read_config"]


POSITION_OFFSET = 2
"""Rows of the table of positions that are not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OPTConfig(ModelConfig):
    """A network whose norms stand before the parts, or behind the sums (350M, which embeds in fewer dimensions too)."""

    norm_before: bool
    norm_weights: bool
    """Norms have weights and biases (not in Galactica)."""
    final_norm: bool
    """There is a norm behind the layers."""


def read_config(config: Fields) -> OPTConfig:
    """Biases everywhere or nowhere."""
    bias = config.flag("enable_bias", default=True)
    norm_before = config.flag("do_layer_norm_before", default=True)
    final_norm = norm_before and not config.flag("_remove_final_layer_norm", default=False)
    norm_weights = config.flag("layer_norm_elementwise_affine", default=True)
    named = config.named(
        intermediate_size="ffn_dim", hidden_act="activation_function", rms_norm_eps="-", num_key_value_heads="-"
    )
    values = decoder_fields(named, tied=True, act="relu", acts=ACTIVATIONS, eps=1e-5, rotary=False)
    values |= {"qkv_bias": bias, "attention_out_bias": bias, "mlp_bias": bias, "mlp_gated": False, "norm_bias": True}
    hidden, context = values["hidden_size"], values["max_model_len"]
    width = config.integer("word_embed_proj_dim", default=hidden, minimum=1)
    others = (context + POSITION_OFFSET) * hidden
    if width != hidden:
        others += 2 * width * hidden
    if not (final_norm and norm_weights):  # the ledger counts one
        others -= 2 * hidden
    return OPTConfig(
        **values,
        embedding_size=width,
        norms_per_layer=2 * norm_weights,
        norm_before=norm_before,
        norm_weights=norm_weights,
        final_norm=final_norm,
        other_parameters=others,
    )
