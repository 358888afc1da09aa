"""Falcon H1 (TII 2025, arXiv:2507.22448): Mamba-2 and attention side by side in every layer, with constant factors at
every joint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quire_interfaces import CheckpointError, Fields
from quire_models.decoder_sizes import decoder_sizes
from quire_models.feed_forward_spec import GatedMLPSpec
from quire_models.recurrent_fields import hybrid_mamba2
from quire_models.spec import HeadSpec, LayerSpec, NetworkSpec

__all__ = ["FalconH1LayerSpec", "ScaledMLPSpec", "spec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledMLPSpec(GatedMLPSpec):
    """c * down(act(g * gate(x)) * up(x))."""

    gate_factor: float
    """g."""
    out_factor: float
    """c."""
    built_by: ClassVar[str] = "quire_models.families.falcon_h1_layers:ScaledMLP"


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconH1LayerSpec(LayerSpec):
    """x + mamba(norm(x)) + attention(norm(x)), then x + mlp(norm(x)); both mixers have factors of what they take and
    give."""

    mamba_factors: tuple[float, float]
    attention_factors: tuple[float, float]
    built_by: ClassVar[str] = "quire_models.families.falcon_h1_layers:make_layer"


def spec(config: Fields) -> NetworkSpec:
    """Each layer has two caches: its mixer's states, and its attention's keys and values."""
    config.fixed("hidden_act", "silu", "swish")  # the mixers take it, too
    sizes = decoder_sizes(config)
    mamba = hybrid_mamba2(
        config,
        sizes,
        normed=config.flag("mamba_rms_norm", default=False),
        norm_before_gate=config.flag("mamba_norm_before_gate", default=True),
        factors=_factors(config, "ssm_multipliers", 5),
    )
    if config.flag("projectors_bias", default=False) != mamba.proj_bias:
        raise CheckpointError(
            f"{config.source}: projectors_bias other than mamba_proj_bias ({mamba.proj_bias}) is not supported"
        )

    def factor(name: str) -> float:
        return config.number(f"{name}_multiplier", default=1.0)

    attention = sizes.attention(bias=config.flag("attention_bias", default=False), key_factor=factor("key"))
    gate_factor, out_factor = _factors(config, "mlp_multipliers", 2)
    mlp = ScaledMLPSpec(
        name="feed_forward",
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        act=sizes.act,
        bias=config.flag("mlp_bias", default=False),
        gate_factor=gate_factor,
        out_factor=out_factor,
    )
    return sizes.network(
        (
            FalconH1LayerSpec(
                name=f"model.layers.{layer}",
                mixers=(mamba, attention),
                feed_forward=mlp,
                input_norm=sizes.rms_norm("input_layernorm"),
                feed_forward_norm=sizes.rms_norm("pre_ff_layernorm"),
                mamba_factors=(factor("ssm_in"), factor("ssm_out")),
                attention_factors=(factor("attention_in"), factor("attention_out")),
            )
            for layer in sizes.layers
        ),
        final_norm="final_layernorm",
        embedding=sizes.embedding(factor=factor("embedding")),
        head=HeadSpec(tied=sizes.tied, factor=factor("lm_head")),
        caches_by_mixer=True,
    )


def _factors(config: Fields, name: str, count: int) -> tuple[float, ...]:
    factors = config.get(name)
    if factors is None:
        return (1.0,) * count
    if not isinstance(factors, list) or len(factors) != count or any(type(f) not in (int, float) for f in factors):
        raise CheckpointError(f"{config.source}: {name} must be {count} numbers, is {factors!r}")
    return tuple(map(float, factors))
