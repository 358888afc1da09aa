"""Mamba-2's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import CheckpointError, Fields
from quire_models.mixer_shapes import Mamba2Shape, WeightCount, time_step_limit
from quire_models.recurrent_config import LayerCache, RecurrentConfig, attention_free_fields

__all__ = ["Mamba2Config", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config(RecurrentConfig):
    """Layers of one Mamba-2 mixer each."""

    mixer: Mamba2Shape


def read_config(config: Fields) -> Mamba2Config:
    """Names and defaults of the Mamba-2 family."""
    values = attention_free_fields(config, tied=False)
    hidden, layers = values["hidden_size"], values["num_layers"]
    mixer = Mamba2Shape(
        hidden_size=hidden,
        num_heads=config.integer("num_heads", default=128, minimum=1),
        head_dim=config.integer("head_dim", default=64, minimum=1),
        state_size=config.integer("state_size", default=128, minimum=1),
        num_groups=config.integer("n_groups", default=8, minimum=1),
        conv_kernel=config.integer("conv_kernel", default=4, minimum=1),
        conv_bias=config.flag("use_conv_bias", default=True),
        proj_bias=config.flag("use_bias", default=False),
        eps=values["rms_norm_eps"],
        dt_limit=time_step_limit(config),
    )
    mixer.check(config.source)
    if mixer.inner_size != config.number("expand", default=2) * hidden:
        raise CheckpointError(
            f"{config.source}: expand * hidden_size must be num_heads * head_dim "
            f"({mixer.num_heads} * {mixer.head_dim}), is {config.get('expand')} * {hidden}"
        )
    return Mamba2Config(
        **values,
        mixer=mixer,
        mixer_width=mixer.width,
        caches=tuple(LayerCache(f"backbone.layers.{layer}.mixer", mixer.states) for layer in range(layers)),
        weights={"state space": mixer.weights(layers), "norms": WeightCount(others=(layers + 1) * hidden)},
    )
