"""Arithmetic in bfloat16 and 8-bit floats within kernels is torch's, also under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from kernels_cuda_attention_cases import DEVICE

from quire_kernels_cuda import triton as kernels

assert kernels.__all__ == []  # importing it repairs the interpreter
SIZE = 64


@triton.jit
def _arithmetic(x, y, total, product, least, negative, doubled, chosen, SIZE: tl.constexpr):
    lanes = tl.arange(0, SIZE)
    a, b = tl.load(x + lanes), tl.load(y + lanes)
    tl.store(total + lanes, a + b)
    tl.store(product + lanes, a * b)
    tl.store(least + lanes, tl.minimum(a, b))
    tl.store(negative + lanes, -tl.abs(a))
    tl.store(doubled + lanes, 2.0 * a)
    tl.store(chosen + lanes, tl.where(a > b, a, b))


def test_bfloat16_arithmetic() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(2, SIZE).to(torch.bfloat16)
    outs = [torch.full((SIZE,), float("nan"), dtype=torch.bfloat16, device=DEVICE) for _ in range(6)]
    _arithmetic[(1,)](a.to(DEVICE), b.to(DEVICE), *outs, SIZE=SIZE)
    wanted = [a + b, a * b, torch.minimum(a, b), -a.abs(), 2 * a, torch.maximum(a, b)]
    for got, expected in zip(outs, wanted, strict=True):
        assert torch.equal(got.cpu(), expected)


@triton.jit
def _convert(x, out, SIZE: tl.constexpr):
    lanes = tl.arange(0, SIZE)
    tl.store(out + lanes, tl.load(x + lanes).to(out.dtype.element_ty))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float16),
        (torch.float16, torch.bfloat16),
        (torch.int8, torch.bfloat16),
        (torch.int32, torch.bfloat16),
        (torch.bfloat16, torch.int32),
        (torch.float32, torch.float8_e4m3fn),
        (torch.float8_e4m3fn, torch.float32),
        (torch.float8_e5m2, torch.bfloat16),
        (torch.float32, torch.float8_e5m2),
    ],
    ids=str,
)
def test_conversions(source: torch.dtype, target: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(SIZE) * torch.logspace(-4, 2, SIZE)).clamp(-120, 120)  # subnormal numbers of 8 bits, and halves
    x[:4] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 0.0, 1.0625])
    x = x.to(source)
    out = torch.zeros(SIZE, dtype=target, device=DEVICE)
    _convert[(1,)](x.to(DEVICE), out, SIZE=SIZE)
    assert torch.equal(out.cpu().float(), x.float().to(target).float())


@triton.jit
def _product(x, y, out, SIZE: tl.constexpr):
    lanes = tl.arange(0, SIZE)
    at = lanes[:, None] * SIZE + lanes[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(2, SIZE, SIZE).to(dtype)
    out = torch.full((SIZE, SIZE), float("nan"), device=DEVICE)
    _product[(1,)](a.to(DEVICE), b.to(DEVICE), out, SIZE=SIZE)
    assert torch.allclose(out.cpu(), a.float() @ b.float(), atol=1e-4)
