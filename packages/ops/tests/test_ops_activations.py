"""Functions of single numbers: every backend against the reference, over the whole range of numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire_ops import OpBackend, OpRequest, op_table, ops
from quire_ops import ops as ref

NAMES = ("silu", "gelu", "gelu_erf", "sigmoid", "tanh", "expm1")
UNIT = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
"""Of the last place of a number between 1 and 2."""
LEAST = {torch.float32: 2e-38, torch.bfloat16: 2e-38, torch.float16: 2.0**-24}
"""What may be lost where numbers are too small for all their digits."""
CASES = [
    (backend, dtype)
    for backend in op_table().backends(ops.activation)
    for dtype in UNIT
    if backend.name != "reference" and backend.refusal(OpRequest(dtype=dtype)) is None
]


def cases(chosen: list[tuple[OpBackend, torch.dtype]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("backend", "dtype"), chosen, ids=[f"{b.name}-{d}" for b, d in chosen])


def numbers(dtype: torch.dtype) -> Tensor:
    """Of both signs, from 2^-20 to 80; an odd number of them."""
    sizes = torch.cat((torch.linspace(0, 80, 4001), torch.logspace(-20, 6, 4000, base=2)))
    return torch.cat((sizes, -sizes, torch.zeros(1))).to(dtype)


@cases(CASES)
@pytest.mark.parametrize("name", NAMES)
def test_activation(backend: OpBackend, dtype: torch.dtype, name: str) -> None:
    x = numbers(dtype)
    got, wanted = backend.function(x.clone(), name), ref.activation(x.double(), name)
    assert got.dtype == dtype
    kept = wanted.abs() <= torch.finfo(dtype).max  # of float16, the others overflow
    error = (got.double() - wanted).abs()[kept]
    sizes, inputs = wanted.abs()[kept], x.double().abs()[kept]
    allowed = 4 * UNIT[dtype] * sizes + LEAST[dtype]
    allowed += UNIT[torch.float32] * sizes * inputs  # an exponent of e is rounded, too
    if "gelu" in name:
        allowed += UNIT[torch.float32] * inputs.clamp_max(8.0)  # 1 + f(x) near zero
    assert (error <= allowed).all(), (error / allowed).max()


@cases(CASES)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_usual_number(backend: OpBackend, dtype: torch.dtype, name: str) -> None:
    x = torch.tensor([torch.nan, torch.inf, -0.0, -torch.inf], dtype=dtype)
    got, wanted = backend.function(x.clone(), name).float(), ref.activation(x, name).float()
    assert got[0].isnan()
    if "lu" in name:  # minus infinity times nothing
        got, wanted = got[:3], wanted[:3]
    torch.testing.assert_close(got[1:], wanted[1:], rtol=0, atol=LEAST[dtype])


@cases([case for case in CASES if case[0].batch_invariant])
@pytest.mark.parametrize("name", NAMES)
def test_an_invariant_backend_computes_a_number_alike_wherever_it_stands(
    backend: OpBackend, dtype: torch.dtype, name: str
) -> None:
    x = torch.randn(50_003, generator=torch.Generator().manual_seed(1)).mul(4).to(dtype)
    whole = backend.function(x.clone(), name)
    for begin, end in ((0, 1), (1, 18), (7, 40_007), (50_000, 50_003), (3, 50_003)):
        assert torch.equal(backend.function(x[begin:end].clone(), name), whole[begin:end])
    assert torch.equal(backend.function(x[:50_000].view(4, -1).T, name), whole[:50_000].view(4, -1).T)
