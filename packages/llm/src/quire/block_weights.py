"""Which weights stay in the blocks that a checkpoint packs them in. Free of torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from quire.config import QuireConfig
from quire_interfaces.plugins import plugins_of
from quire_models.quantization_config import BLOCK_BYTES, GRID_TYPES

__all__ = ["kept_blocks"]


def kept_blocks(config: QuireConfig) -> frozenset[str]:
    """The names of `BLOCK_BYTES` that op `block_linear` serves, where it is not disabled: on CPUs all, with the
    compiled kernels; on GPUs all but those with grids, with a package of kernels for GPUs."""
    if "block_linear" in config.model.disabled_linear_kernels:
        return frozenset()
    plugins = [plugin for plugin in plugins_of("quire.ops") if plugin.is_allowed]
    if config.runner.device != "cpu":
        served = any(plugin.name in ("cuda", "rocm") for plugin in plugins)
        return frozenset(BLOCK_BYTES) - GRID_TYPES if served else frozenset()
    kernels = [plugin.point.module for plugin in plugins if plugin.name == "cpu"]
    served = any(_has_library(module.partition(".")[0]) for module in kernels)
    return frozenset(BLOCK_BYTES) if served else frozenset()


def _has_library(package: str) -> bool:
    """Whether compiled kernels lie in a package, which is not imported."""
    spec = importlib.util.find_spec(package)
    folders = () if spec is None else spec.submodule_search_locations or ()
    return any(any(Path(folder).glob("*.so")) for folder in folders)
