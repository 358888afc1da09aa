"""Whether weights stay in the blocks that a checkpoint packs them in. Free of torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from quire.config import QuireConfig
from quire_interfaces.plugins import plugins_of

__all__ = ["keeps_blocks"]


def keeps_blocks(config: QuireConfig) -> bool:
    """Whether op `block_linear` serves: on CPUs, with the compiled kernels, where it is not disabled."""
    if config.runner.device != "cpu" or "block_linear" in config.model.disabled_linear_kernels:
        return False
    kernels = [plugin.point.module for plugin in plugins_of("quire.ops") if plugin.name == "cpu" and plugin.is_allowed]
    return any(_has_library(module.partition(".")[0]) for module in kernels)


def _has_library(package: str) -> bool:
    """Whether compiled kernels lie in a package, which is not imported."""
    spec = importlib.util.find_spec(package)
    folders = () if spec is None else spec.submodule_search_locations or ()
    return any(any(Path(folder).glob("*.so")) for folder in folders)
