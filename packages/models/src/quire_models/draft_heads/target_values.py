"""What the configuration of heads without layers takes from their target's. Free of torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from quire_models.config import ModelConfig
from quire_models.spec import HeadSpec, NetworkSpec, recast

__all__ = ["values_of_target"]


def values_of_target(target: ModelConfig, architecture: str, kind: type[NetworkSpec]) -> dict[str, Any]:
    """Fields of `ModelConfig` for heads of `target`, which keep nothing: no layers, no media, weights as they are.

    Args:
        target: The model that they draft for.
        architecture: Name of the class of the heads.
        kind: Class of the record of their network.
    """
    plain = NetworkSpec(
        **{field.name: getattr(target.network, field.name) for field in dataclasses.fields(NetworkSpec)}
    )
    return {field.name: getattr(target, field.name) for field in dataclasses.fields(ModelConfig)} | {
        "architecture": architecture,
        "network": recast(kind, dataclasses.replace(plain, layers=(), head=HeadSpec(tied=False))),
        "media": None,
        "language_names": None,
        "quantization": None,
        "quantization_method": "",
        "is_native": True,
        "stored_parameters": None,
    }
