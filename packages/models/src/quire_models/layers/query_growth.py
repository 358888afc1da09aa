"""Queries that grow with the logarithm of their position (Nakanishi 2025, scalable softmax, sec. 3), in steps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire_models.mixer_spec import QueryGrowthSpec

__all__ = ["QueryGrowth"]


class QueryGrowth:
    """positions [T] int64 -> factors [T] float32 of their queries: 1 + scale * log(1 + (position + offset) // step)."""

    __slots__ = ("_factors", "_offset", "_step")

    def __init__(self, spec: QueryGrowthSpec, device: torch.device) -> None:
        # Looked up, since torch's logarithm of a position follows where in the step it stands.
        steps = (spec.max_positions + spec.offset) // spec.step + 1
        factors = [1 + spec.scale * math.log1p(i) for i in range(steps)]
        self._factors = torch.tensor(factors, dtype=torch.float32, device=device)
        self._step, self._offset = spec.step, spec.offset

    def __call__(self, positions: Tensor) -> Tensor:
        return self._factors[(positions + self._offset) // self._step]
