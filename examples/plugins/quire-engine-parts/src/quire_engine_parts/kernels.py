"""A kernel: op `rms_norm` in float64, before all others on the CPU. A real one would call compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire_ops import OpBackend, ops

__all__ = ["backends"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `quire_ops.ops.rms_norm`: x [num_tokens, size], weight [size] -> [num_tokens, size], dtype of x."""
    wide = x.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.double()).to(x.dtype)


def backends() -> Sequence[OpBackend[..., Any]]:
    """The records of this package."""
    return [
        OpBackend(
            op=ops.rms_norm,
            name="engine_parts",
            function=rms_norm,
            priority=1000,
            devices=frozenset({"cpu"}),
            batch_invariant=True,
        )
    ]
