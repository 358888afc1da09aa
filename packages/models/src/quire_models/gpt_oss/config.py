"""Config.json of gpt-oss."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import Fields
from quire_models.config_fields import decoder_fields, layer_windows
from quire_models.moe_config import MoEConfig, expert_counts

__all__ = ["GptOssConfig", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssConfig(MoEConfig):
    """Every layer has experts with a clipped gate."""

    swiglu_limit: float
    """Gate is at most this; up lies between this and its negative."""


def read_config(config: Fields) -> GptOssConfig:
    """Windows in every other layer, sinks in all; matrices have biases."""
    config.fixed("hidden_act", "silu")
    config.fixed("swiglu_alpha", 1.702)
    bias = config.flag("attention_bias", default=True)
    values = decoder_fields(config, head_dim=64, theta=150000.0)
    num_experts, per_token = expert_counts(config, "num_local_experts", "num_experts_per_tok")
    layers = values["num_layers"]
    alternating = tuple(layer % 2 == 0 for layer in range(layers))
    values |= {
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "sliding_windows": layer_windows(config, layers, default=alternating),
        "attention_sinks": True,
        "other_parameters": layers * values["num_heads"],  # the sinks
    }
    return GptOssConfig(
        **values,
        sparse_layers=(True,) * layers,
        num_experts=num_experts,
        num_experts_per_tok=per_token,
        moe_intermediate_size=values["intermediate_size"],
        expert_bias=True,
        router_parameters=num_experts,
        swiglu_limit=config.number("swiglu_limit", default=7.0, above=0.0),
    )
