"""The pooler of a served checkpoint, as data. Importing this module loads no torch, nor does reading a pooler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.config import QuireConfig
from quire_interfaces import PoolerConfig
from quire_models.config import ModelConfig
from quire_pooling import PoolerSpec

__all__ = ["pools", "read_pooler_spec"]

_METHODS = {"cls_token": "CLS", "mean_tokens": "MEAN", "lasttoken": "LAST", "max_tokens": "MAX"}


def pools(config: QuireConfig, model: ModelConfig) -> bool:
    """Whether the settings and the checkpoint ask for an engine that pools alone."""
    return model.is_encoder


def read_pooler_spec(config: QuireConfig, folder: Path, model: ModelConfig) -> PoolerSpec:
    """The pooler that the checkpoint's files describe, with what `pooler_config` replaces.

    Args:
        config: Settings.
        folder: The model's.
        model: Its configuration.

    Raises:
        CheckpointError: the files cannot be understood.
        ConfigError: a wrong field of `pooler_config`.
    """
    methods: Any = ("CLS",) if model.is_encoder else ("LAST",)
    path = folder / "1_Pooling" / "config.json"
    if path.is_file():
        fields = json.loads(path.read_text())
        methods = tuple(name for key, name in _METHODS.items() if fields.get(f"pooling_mode_{key}"))
    spec = PoolerSpec(hidden_size=model.hidden_size, methods=methods)
    return spec.with_config(PoolerConfig.from_dict(config.model.pooler_config or {}))
