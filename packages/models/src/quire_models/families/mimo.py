"""MiMo (Xiaomi 2025, arXiv:2505.07608): Qwen2 with layers that predict further tokens, which are not loaded."""

from __future__ import annotations

from dataclasses import replace

from quire_interfaces import Fields
from quire_models.families import qwen2
from quire_models.spec import CheckpointNames, NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """Queries, keys and values have biases."""
    return replace(qwen2.spec(config), checkpoint=CheckpointNames(ignored_prefixes=("model.mtp_layers.",)))
