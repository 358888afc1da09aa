"""The grids of ggml's i-quants, as the package gguf has them. Knows that package; does not know files."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from quire_interfaces import CheckpointError
from quire_ops.block_formats import BLOCK_FORMATS

__all__ = ["grid_of", "library"]


@cache
def grid_of(kind: str) -> Tensor | None:
    """The grid of a type as the constants of its format in `BLOCK_FORMATS`; None for types that have none.

    Raises:
        CheckpointError: The package gguf is not installed.
    """
    if kind not in BLOCK_FORMATS or not BLOCK_FORMATS[kind].grid:
        return None
    quants = library()
    traits = getattr(quants, kind)
    traits.init_grid()
    eighths = 8 if kind.startswith("IQ1") else 1
    return torch.from_numpy(traits.grid * eighths).to(torch.int8).flatten().view(torch.float32)


def library() -> Any:
    """`gguf.quants`.

    Raises:
        CheckpointError: The package is not installed.
    """
    try:
        from gguf import quants
    except ImportError as error:
        raise CheckpointError(
            "some types of this GGUF file need the package gguf, which is not installed; install quire-models[gguf], "
            "or use a file of another type (Q4_K_M, Q8_0)"
        ) from error
    return quants
