"""Falcon H1's config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import decoder_fields
from quire_models.mixer_shapes import Mamba2Shape, WeightCount, hybrid_mamba2
from quire_models.recurrent_config import LayerCache, RecurrentConfig, attention_weights, gated_mlp_weights

__all__ = ["FalconH1Config", "read_config"]

FACTORS = (
    "embedding_multiplier",
    "lm_head_multiplier",
    "key_multiplier",
    "attention_in_multiplier",
    "attention_out_multiplier",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconH1Config(RecurrentConfig):
    """Mamba-2 and attention side by side in every layer, with constant factors at every joint."""

    mixer: Mamba2Shape
    embedding_multiplier: float
    lm_head_multiplier: float
    key_multiplier: float
    attention_in_multiplier: float
    attention_out_multiplier: float
    ssm_in_multiplier: float
    ssm_out_multiplier: float
    mlp_multipliers: tuple[float, ...]
    """Of the gate's input, and of the result."""
    ssm_multipliers: tuple[float, ...]
    """Of what the mixer projects: gate, input, what writes the state, what reads it, time steps."""


def read_config(config: Fields) -> FalconH1Config:
    """Each layer has two caches: its mixer's states, and its attention's keys and values."""
    config.fixed("hidden_act", "silu", "swish")  # the mixers take it, too
    values = decoder_fields(config)
    hidden, layers = values["hidden_size"], values["num_layers"]
    bias = config.flag("attention_bias", default=False)
    values |= {
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": config.flag("mlp_bias", default=False),
        "sliding_windows": (None,) * (2 * layers),  # one per cache
    }
    mixer = hybrid_mamba2(
        config,
        values,
        normed=config.flag("mamba_rms_norm", default=False),
        norm_before_gate=config.flag("mamba_norm_before_gate", default=True),
    )
    if config.flag("projectors_bias", default=False) != mixer.proj_bias:
        raise CheckpointError(
            f"{config.source}: projectors_bias other than mamba_proj_bias ({mixer.proj_bias}) is not supported"
        )
    query, kv = (values[heads] * values["head_dim"] for heads in ("num_heads", "num_kv_heads"))
    caches = []
    for layer in range(layers):
        at = f"model.layers.{layer}"
        caches += [LayerCache(f"{at}.mamba", mixer.states), LayerCache(f"{at}.self_attn")]
    factors: dict[str, Any] = {name: config.number(name, default=1.0) for name in FACTORS}
    return FalconH1Config(
        **values,
        mixer=mixer,
        mixer_width=mixer.width,
        caches=tuple(caches),
        weights={
            "attention": attention_weights(values, layers, bias=bias * (query + 2 * kv + hidden)),
            "state space": mixer.weights(layers),
            "MLP": gated_mlp_weights(hidden, values["intermediate_size"], layers, bias=values["mlp_bias"]),
            "norms": WeightCount(others=(2 * layers + 1) * hidden),
        },
        **factors,
        mlp_multipliers=_factors(config, "mlp_multipliers", 2),
        ssm_multipliers=_factors(config, "ssm_multipliers", 5),
    )


def _factors(config: Fields, name: str, count: int) -> tuple[float, ...]:
    given = config.get(name)
    if given is None:
        return (1.0,) * count
    if not isinstance(given, list) or len(given) != count or any(type(each) not in (int, float) for each in given):
        raise CheckpointError(f"{config.source}: {name} must be {count} numbers, is {given!r}")
    return tuple(map(float, given))
