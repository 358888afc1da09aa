"""Mamba (Gu & Dao 2023, arXiv:2312.00752), Falcon Mamba (Zuo et al. 2024, arXiv:2410.05355) and Mamba-2 (Dao & Gu
2024, arXiv:2405.21060): norm and mixer in each layer, no attention and no positions."""

from __future__ import annotations

from typing import Any

from quire_interfaces import CheckpointError, Fields
from quire_models.mixer_spec import Mamba1Spec, Mamba2Spec
from quire_models.recurrent_fields import (
    LayerParts,
    attention_free_sizes,
    backbone,
    check_groups,
    dt_rank,
    time_step_limit,
)
from quire_models.spec import NetworkSpec

__all__ = ["spec", "spec_of_falcon", "spec_of_mamba2"]


def spec(config: Fields) -> NetworkSpec:
    """Names and defaults of the Mamba family."""
    return _mamba1(config, norms="")


def spec_of_falcon(config: Fields) -> NetworkSpec:
    """Time steps and projections are normalised, without weights."""
    return _mamba1(config, norms="plain")


def _mamba1(config: Fields, *, norms: Any) -> NetworkSpec:
    sizes = attention_free_sizes(config, tied=True)
    hidden = sizes.hidden_size
    mixer = Mamba1Spec(
        name="mixer",
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
    return backbone(sizes, [LayerParts(mixer)] * sizes.num_layers)


def spec_of_mamba2(config: Fields) -> NetworkSpec:
    """Names and defaults of the Mamba-2 family."""
    sizes = attention_free_sizes(config, tied=False)
    mixer = Mamba2Spec(
        name="mixer",
        hidden_size=sizes.hidden_size,
        num_heads=config.integer("num_heads", default=128, minimum=1),
        head_dim=config.integer("head_dim", default=64, minimum=1),
        state_size=config.integer("state_size", default=128, minimum=1),
        num_groups=config.integer("n_groups", default=8, minimum=1),
        conv_kernel=config.integer("conv_kernel", default=4, minimum=1),
        conv_bias=config.flag("use_conv_bias", default=True),
        proj_bias=config.flag("use_bias", default=False),
        eps=sizes.eps,
        dt_limit=time_step_limit(config),
    )
    check_groups(mixer, config.source)
    if mixer.inner_size != config.number("expand", default=2) * sizes.hidden_size:
        raise CheckpointError(
            f"{config.source}: expand * hidden_size must be num_heads * head_dim "
            f"({mixer.num_heads} * {mixer.head_dim}), is {config.get('expand')} * {sizes.hidden_size}"
        )
    return backbone(sizes, [LayerParts(mixer)] * sizes.num_layers)
