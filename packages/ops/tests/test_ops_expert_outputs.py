"""Op `fused_moe` in two: each half against its reference, and both together against the whole, bit for bit."""

from __future__ import annotations

import pytest
import torch
from test_ops_fused_moe import TOLERANCE, check, each_backend, make_experts, make_step, widened

from quire_ops import OpBackend, OpRequest, op_table, ops


def halves(name: str, dtype: torch.dtype) -> tuple[OpBackend, OpBackend]:
    """The backends of both ops under one name."""
    request = OpRequest(dtype=dtype)
    first, second = (
        next(each for each in op_table().backends(op) if each.name == name and each.refusal(request) is None)
        for op in (ops.expert_outputs, ops.moe_sum)
    )
    return first, second


@each_backend
@pytest.mark.parametrize("kind", ["plain", "int8", "int4", "w8a8"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_halves_are_the_whole(backend: OpBackend, dtype: torch.dtype, kind: str, tokens: int) -> None:
    if backend.name not in ("torch", "cpu"):
        pytest.skip(f"{backend.name} has the whole alone")
    torch.manual_seed(tokens)
    outputs, sum_ = halves(backend.name, dtype)
    experts = make_experts(5, 96, 70 if kind == "plain" else 64, dtype, bias=True, kind=kind)
    x, ids, weights = make_step(tokens, 96, 5, 3, dtype)
    pair_tokens = torch.arange(tokens).repeat_interleave(3)
    values = outputs.function(experts)(x[pair_tokens], ids.flatten())
    expected = ops.expert_outputs(widened(experts))(x.double()[pair_tokens], ids.flatten())
    steps = 1 / 127 if kind == "w8a8" else 0.0  # what experts have inside may end up one step away
    assert (values - expected).abs().max() <= (TOLERANCE[dtype] + steps) * expected.abs().max()
    whole = backend.function(experts)(x, ids, weights)
    assert torch.equal(sum_.function(values.view(tokens, 3, -1), ids, weights, dtype), whole)


@each_backend
def test_sums_are_those_of_the_reference(backend: OpBackend, dtype: torch.dtype) -> None:
    if backend.name not in ("torch", "cpu"):
        pytest.skip(f"{backend.name} has the whole alone")
    torch.manual_seed(3)
    _, sum_ = halves(backend.name, dtype)
    _, ids, weights = make_step(9, 1, 7, 4, dtype)
    values = torch.randn(9, 4, 37)
    check(sum_.function(values, ids, weights, dtype), ops.moe_sum(values, ids, weights, torch.float64), dtype)
