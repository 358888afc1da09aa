"""GPT-J's config.json."""

from __future__ import annotations

from quire_interfaces import CheckpointError, Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import ACTIVATIONS, decoder_fields

__all__ = ["read_config"]


def read_config(config: Fields) -> ModelConfig:
    """The first `rotary_dim` dimensions of each head are rotated."""
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
    values = decoder_fields(named, act="gelu_new", acts=ACTIVATIONS, eps=1e-5, inner_factor=4)
    values |= {"mlp_bias": True, "mlp_gated": False, "norm_bias": True, "norms_per_layer": 1}
    values["rotary_dim"] = config.integer("rotary_dim", default=64, minimum=2)
    if values["rotary_dim"] % 2 or values["rotary_dim"] > values["head_dim"]:
        raise CheckpointError(
            f"{config.source}: rotary_dim must be even and at most the {values['head_dim']} dimensions of a head, is "
            f"{values['rotary_dim']}"
        )
    return ModelConfig(**values, other_parameters=values["vocab_size"])
