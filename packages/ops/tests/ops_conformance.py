"""What holds every backend of an op to its reference: which backends there are, and how close they must come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire_ops import Op, OpBackend, OpRequest, op_table

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
"""Of the largest result: some units in the last place of the dtype."""

BACKENDS = [backend for op in op_table().ops for backend in op_table().backends(op) if backend.name != "reference"]


def serving(op: Op[..., Any]) -> list[OpBackend]:
    return [backend for backend in BACKENDS if backend.op is op and backend.refusal(OpRequest()) is None]


def usable(op: Op[..., Any]) -> list[tuple[OpBackend, torch.dtype]]:
    return [
        (backend, dtype)
        for backend in BACKENDS
        for dtype in TOLERANCE
        if backend.op is op and backend.refusal(OpRequest(dtype=dtype)) is None
    ]


def cases(op: Op[..., Any]) -> pytest.MarkDecorator:
    pairs = usable(op)
    assert pairs, f"no backend but the reference serves {op}"
    return pytest.mark.parametrize(("backend", "dtype"), pairs, ids=[f"{b.name}-{d}" for b, d in pairs])


def check(got: Tensor, wanted: Tensor) -> None:
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    assert torch.isfinite(got).all()
    error = (got.double() - wanted.double()).abs().max()
    assert error <= TOLERANCE[got.dtype] * wanted.double().abs().max().clamp_min(1e-3)


def check_wide(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """float32 results, with the rounding of the dtype that went in."""
    assert got.dtype == wanted.dtype == torch.float32
    assert (got - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max().clamp_min(1e-3)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)
