"""Nemotron-H whose layers were searched for one by one (Bercovich et al. 2025, arXiv:2411.19146): experts of another
number and width in each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire_interfaces import CheckpointError, Fields
from quire_models.families import nemotron_h
from quire_models.spec import NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """`block_configs` says of each layer its kind (`block_type`), and what it has otherwise than config.json says."""
    blocks = config.get("block_configs")
    if not isinstance(blocks, list) or not blocks or not all(isinstance(each, Mapping) for each in blocks):
        raise CheckpointError(f"{config.source}: block_configs must describe each layer")
    kinds = [block.get("block_type") for block in blocks]
    networks = [_uniform(config, kinds, block) for block in blocks]
    layers = tuple(network.layers[number] for number, network in enumerate(networks))
    return replace(networks[0], layers=layers)


def _uniform(config: Fields, kinds: Sequence[object], block: Mapping[str, Any]) -> NetworkSpec:
    """The network whose layers of each kind all are what this block says; those of other kinds are not looked at."""
    own = {name: value for name, value in block.items() if name != "block_type" and value is not None}
    if block.get("block_type") != "moe":  # experts are other blocks' matter, but have to have sizes
        own |= {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 1}
    view = config
    for name, value in {**own, "layers_block_type": list(kinds)}.items():
        key = f"block_configs.{name}"
        view = view.named(**{name: key}).with_default(name, value)
    return nemotron_h.spec(view)
