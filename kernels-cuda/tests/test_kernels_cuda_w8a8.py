"""Op `w8a8_linear` in Triton: tokens are rounded as the reference does, what is not finite stays in its row."""

from __future__ import annotations

import pytest
import torch
from kernels_cuda_support import DEVICE, TOLERANCE, here, poison

from quire_kernels_cuda.platform import NVIDIA, pretending
from quire_kernels_cuda.targets import NVIDIA_TARGETS
from quire_kernels_cuda.triton import rounding
from quire_kernels_cuda.triton.w8a8 import byte_splits, byte_tile, w8a8_linear
from quire_ops import ActivationScheme
from quire_ops import ops as ref
from quire_ops.activation_quant import quantize_int8


def rows(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of every magnitude, one of zeros, one too small to divide by, and two that are not finite."""
    x = torch.randn(9, size + 3) * torch.tensor([1, 1e-3, 30, 1e20, 1, 0, 1e-43, 1, 1])[:, None]
    x[4] = torch.arange(size + 3) % 255 - 127 + 0.5 * (torch.arange(size + 3) % 2)  # halves
    x[7, 2], x[8, 3] = float("inf"), float("nan")
    return x.to(dtype)[:, :size]


@pytest.mark.parametrize("input_scale", [0.0, 0.75])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_are_the_references(monkeypatch, dtype: torch.dtype, input_scale: float) -> None:
    torch.manual_seed(0)
    x, scale = rows(300, dtype), torch.tensor([input_scale])
    monkeypatch.setattr(rounding, "_BLOCK", 256)  # so that a program goes through a row in parts
    tokens, steps, _ = rounding.round_rows(here(x), ActivationScheme(torch.int8, here(scale)))
    wanted = quantize_int8(x, scale)
    assert torch.equal(tokens.cpu(), wanted[0])
    assert torch.equal(steps.cpu().nan_to_num(-1.0), wanted[1].nan_to_num(-1.0))
    assert wanted[1].isnan().tolist() == [False] * 7 + [True] * 2


@pytest.mark.parametrize(("num_rows", "has_bias"), [(9, True), (40, False)])
@pytest.mark.parametrize("wide", [False, True])
def test_equals_reference(monkeypatch, num_rows: int, has_bias: bool, wide: bool) -> None:
    torch.manual_seed(1)
    dtype = torch.bfloat16
    x = torch.cat((rows(140, dtype)[[0, 1, 2, 4, 5, 7]], torch.randn(num_rows - 6, 140).to(dtype)))
    weight = torch.randint(-127, 128, (70, 140), dtype=torch.int8)
    scale, bias = torch.rand(70).to(dtype), torch.randn(70).to(dtype) if has_bias else None
    wanted = ref.w8a8_linear(x, weight, scale, torch.zeros(1), bias, wide=wide)
    poison(monkeypatch)
    got = w8a8_linear(*here((x, weight, scale, torch.zeros(1), bias)), wide=wide).cpu()
    assert got.dtype == wanted.dtype
    assert got[5].isnan().all()
    kept = torch.arange(num_rows) != 5
    error = (got[kept].double() - wanted[kept].double()).abs().amax(1) / wanted[kept].double().abs().amax(1).clamp(1e-9)
    assert error.max() <= TOLERANCE[torch.float32 if wide else dtype]


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_row_is_the_same_whether_inputs_are_divided(monkeypatch, has_bias: bool) -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(70, 3300), torch.randint(-127, 128, (40, 3300), dtype=torch.int8)
    scale, bias = torch.rand(40), torch.randn(40) if has_bias else None
    poison(monkeypatch)
    device, given = torch.device(DEVICE), here((weight, scale, torch.zeros(1), bias))
    many = w8a8_linear(here(x), *given)
    for num_rows, split_inputs in ((1, 896), (5, 896), (32, 896), (70, 3300)):
        tile = byte_tile(num_rows, NVIDIA.target_of(device))
        assert byte_splits(num_rows, 40, 3300, tile, device) == split_inputs
        assert torch.equal(w8a8_linear(here(x[:num_rows]), *given), many[:num_rows])
    wanted = ref.w8a8_linear(x, weight, scale, torch.zeros(1), bias)
    assert (many.cpu() - wanted).abs().max() <= TOLERANCE[torch.float32] * wanted.abs().max()


@pytest.mark.parametrize(
    ("num_rows", "outputs", "inputs", "splits"),
    [
        (1, 4096, 14336, 4), (64, 4096, 14336, 2), (1, 4096, 4096, 2), (1, 6144, 4096, 1), (1, 28672, 4096, 1),
        (1, 1024, 3072, 4), (64, 1024, 3072, 4), (1, 4096, 1024, 1), (65, 1024, 3072, 1), (512, 4096, 14336, 1),
    ],
)  # fmt: skip
def test_inputs_are_divided_where_that_saves_more_than_a_launch(num_rows, outputs, inputs, splits) -> None:
    """Products of an 8B and a 0.6B network on an H100."""
    with pretending(NVIDIA_TARGETS["sm_90"]):
        tile = byte_tile(num_rows, NVIDIA_TARGETS["sm_90"])
        assert -(-inputs // byte_splits(num_rows, outputs, inputs, tile, torch.device("meta"))) == splits
    with pretending(NVIDIA_TARGETS["sm_100"]):  # where 128 outputs of 64 rows spill registers
        assert [byte_tile(number, NVIDIA_TARGETS["sm_100"])["BN"] for number in (32, 64, 65)] == [32, 64, 128]
