"""Config.json of ERNIE 4.5's mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import Fields
from quire_models.config_fields import decoder_fields
from quire_models.moe_config import MoEConfig, expert_counts

__all__ = ["ErnieMoEConfig", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErnieMoEConfig(MoEConfig):
    """Probabilities of a token's experts are divided by their sum, but by no less than `norm_min`."""

    norm_min: float


def read_config(config: Fields) -> ErnieMoEConfig:
    """Every so many layers between the first and the last have experts; one flag for all biases."""
    bias = config.flag("use_bias", default=False)
    values = decoder_fields(config, tied=True, theta=500000.0)
    values |= {
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bias,
        "other_parameters": values["vocab_size"] * bias,  # the LM head's
    }
    num_experts, per_token = expert_counts(config, "moe_num_experts", "moe_k")
    layers = values["num_layers"]
    first = config.integer("moe_layer_start_index", default=1, minimum=0)
    last = config.integer("moe_layer_end_index", default=-1, minimum=-1)
    step = config.integer("moe_layer_interval", default=1, minimum=1)
    last = layers - 1 if last == -1 else last
    inner = config.integer("moe_intermediate_size", default=1536, minimum=1)
    return ErnieMoEConfig(
        **values,
        sparse_layers=tuple(first <= layer <= last and (layer + 1) % step == 0 for layer in range(layers)),
        num_experts=num_experts,
        num_experts_per_tok=per_token,
        moe_intermediate_size=inner,
        shared_intermediate_size=inner * config.integer("moe_num_shared_experts", default=2, minimum=0),
        router_parameters=num_experts,
        norm_min=config.number("moe_norm_min", default=1e-12, minimum=0.0),
    )
