"""CodeGen's config.json."""

from __future__ import annotations

from quire_interfaces import CheckpointError, Fields
from quire_models.config import ModelConfig
from quire_models.gptj.config import read_config as read_gptj_config

__all__ = ["PARTS", "read_config"]

PARTS = 4
"""Pieces in which a checkpoint keeps its fused projections, for the devices it was trained on."""


def read_config(config: Fields) -> ModelConfig:
    """The fields of GPT-J."""
    model = read_gptj_config(config)
    if model.num_heads % PARTS:
        raise CheckpointError(f"{config.source}: n_head must be a multiple of {PARTS}, is {model.num_heads}")
    return model
