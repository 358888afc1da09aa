"""Mamba's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import Fields
from quire_models.mixer_shapes import Mamba1Shape, WeightCount, dt_rank
from quire_models.recurrent_config import LayerCache, RecurrentConfig, attention_free_fields

__all__ = ["MambaConfig", "read_config", "read_mamba"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig(RecurrentConfig):
    """Layers of one Mamba mixer each."""

    mixer: Mamba1Shape


def read_config(config: Fields) -> MambaConfig:
    """Names and defaults of the Mamba family."""
    return read_mamba(config, norms="")


def read_mamba(config: Fields, *, norms: str) -> MambaConfig:
    """A network of Mamba mixers. `norms`: see `Mamba1Shape`."""
    values = attention_free_fields(config, tied=True)
    hidden, layers = values["hidden_size"], values["num_layers"]
    mixer = Mamba1Shape(
        hidden_size=hidden,
        inner_size=config.integer("intermediate_size", default=config.integer("expand", default=2) * hidden, minimum=1),
        state_size=config.integer("state_size", default=16, minimum=1),
        dt_rank=dt_rank(config, "time_step_rank", hidden),
        conv_kernel=config.integer("conv_kernel", default=4, minimum=1),
        conv_bias=config.flag("use_conv_bias", default=True),
        proj_bias=config.flag("use_bias", default=False),
        norms=norms,
        eps=config.number("mixer_rms_eps", default=1e-6, minimum=0.0),
    )
    return MambaConfig(
        **values,
        mixer=mixer,
        mixer_width=mixer.width,
        caches=tuple(LayerCache(f"backbone.layers.{layer}.mixer", mixer.states) for layer in range(layers)),
        weights={"state space": mixer.weights(layers), "norms": WeightCount(others=(layers + 1) * hidden)},
    )
