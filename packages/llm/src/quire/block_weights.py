"""Whether weights stay in the blocks that a checkpoint packs them in. Free of torch."""

from __future__ import annotations

import importlib.util
from importlib.metadata import entry_points
from pathlib import Path

from quire.config import QuireConfig

__all__ = ["keeps_blocks"]


def keeps_blocks(config: QuireConfig) -> bool:
    """Whether op `block_linear` serves: on CPUs, with the compiled kernels, where it is not disabled."""
    if config.runner.device != "cpu" or "block_linear" in config.model.disabled_linear_kernels:
        return False
    return any(_has_library(entry.module.split(".")[0]) for entry in entry_points(group="quire.ops", name="cpu"))


def _has_library(package: str) -> bool:
    """Whether compiled kernels lie in a package, which is not imported."""
    spec = importlib.util.find_spec(package)
    folders = () if spec is None else spec.submodule_search_locations or ()
    return any(any(Path(folder).glob("*.so")) for folder in folders)
