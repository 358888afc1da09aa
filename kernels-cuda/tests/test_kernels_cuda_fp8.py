"""Op `fp8_linear` in Triton: tokens are rounded as the reference does, what is not finite stays in its row."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernels_cuda_support import DEVICE, TOLERANCE, here, poison

from quire_kernels_cuda.ops import backends, op_backends
from quire_kernels_cuda.platform import NVIDIA
from quire_kernels_cuda.targets import NVIDIA_TARGETS
from quire_kernels_cuda.triton import rounding
from quire_kernels_cuda.triton.fp8 import fp8_linear
from quire_models.layers.stored_linear import StoredLinear
from quire_models.quantization_config import QuantizationConfig
from quire_ops import ActivationScheme, OpRequest, ops
from quire_ops import ops as ref
from quire_ops.activation_quant import quantize_fp8
from quire_ops.backends import replaced_backends
from quire_quantization.kernels import FP8_GROUPS, FP8_TENSOR

multiplies_fp8 = pytest.mark.skipif(
    DEVICE == "cuda" and not NVIDIA.target_of(torch.device("cuda", 0)).has_fp8, reason="this GPU has no fp8"
)


def rows(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of every magnitude, one of zeros, one too small to divide by, and two that are not finite."""
    x = torch.randn(9, size + 3) * torch.tensor([1, 1e-3, 30, 1e20, 1, 0, 1e-43, 1, 1])[:, None]
    x[4] = (torch.arange(size + 3) % 61 - 30) * 17.0  # many are halves between numbers of e4m3
    x[7, 2], x[8, size - 1] = float("inf"), float("nan")
    return x.to(dtype)[:, :size]


@pytest.mark.parametrize(("input_scale", "by_group"), [(0.0, False), (0.0, True), (0.75, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_are_the_references(monkeypatch, dtype: torch.dtype, input_scale: float, by_group: bool) -> None:
    torch.manual_seed(0)
    x, scale = rows(300, dtype), torch.tensor([input_scale])
    wanted, wanted_steps = quantize_fp8(x, scale, by_group=by_group)
    monkeypatch.setattr(rounding, "_BLOCK", 256)  # so that a program goes through a row in parts
    tokens, steps, _ = rounding.round_rows(here(x), ActivationScheme(torch.float8_e4m3fn, here(scale), by_group))
    assert torch.equal(tokens.cpu().float(), wanted.float())
    assert torch.equal(steps.cpu().nan_to_num(-1.0), wanted_steps.nan_to_num(-1.0))
    assert wanted_steps.isnan().any(1).tolist() == [False] * 7 + [True] * 2


SUMMED_WIDE = TOLERANCE[torch.float32] if DEVICE == "cpu" else 1e-3
"""Of a row's largest result, kept in float32. Matrix units of sm_90 keep about 14 bits of a sum of 8-bit products
(DeepSeek-AI 2024, DeepSeek-V3, section 3.3.2): on an H100, `torch._scaled_mm` without fast accumulation is 2.6e-4 away
from float64 at 128 inputs, this kernel 4e-4."""


@multiplies_fp8
@pytest.mark.parametrize(
    ("num_rows", "inputs", "groups", "input_scale", "has_bias", "wide"),
    [
        (9, 140, 1, 0.0, True, False), (40, 140, 1, 0.02, False, True), (9, 300, 3, 0.0, True, True),
        (7, 3300, 26, 0.0, True, True), (9, 3300, 1, 0.02, True, False),
    ],
)  # fmt: skip
def test_equals_reference(monkeypatch, num_rows, inputs, groups, input_scale, has_bias, wide) -> None:
    torch.manual_seed(1)
    dtype = torch.bfloat16
    x = torch.cat((rows(inputs, dtype)[[0, 1, 2, 4, 5, 7]], torch.randn(num_rows - 6, inputs).to(dtype)))
    weight = torch.randn(70, inputs).to(torch.float8_e4m3fn)
    scale, given = torch.rand(70, groups), torch.tensor([input_scale])
    bias = torch.randn(70).to(dtype) if has_bias else None
    wanted = ref.fp8_linear(x, weight, scale, given, bias, wide=wide)
    poison(monkeypatch)
    got = fp8_linear(*here((x, weight, scale, given, bias)), wide=wide).cpu()
    assert got.dtype == wanted.dtype
    assert got[5].isnan().all()
    kept = torch.arange(num_rows) != 5
    error = (got[kept].double() - wanted[kept].double()).abs().amax(1) / wanted[kept].double().abs().amax(1).clamp(1e-9)
    assert error.max() <= (SUMMED_WIDE if wide else TOLERANCE[dtype])


def test_gpus_that_do_not_multiply_fp8_are_refused() -> None:
    for name, serves in (("sm_80", False), ("sm_89", True), ("sm_90", True)):
        backends = op_backends("triton", NVIDIA, None, target=NVIDIA_TARGETS[name])
        (backend,) = (each for each in backends if each.op is ops.fp8_linear)
        assert (backend.unavailable is None) == serves


@pytest.mark.skipif(DEVICE == "cuda", reason="its tensors lie in host memory, which only interpreted kernels read")
@pytest.mark.parametrize(("granularity", "block"), [("tensor", None), ("block", (128, 128))])
def test_layers_of_fp8_checkpoints_round_their_inputs(granularity: str, block: tuple[int, int] | None) -> None:
    """Where the kernel serves, as interpreted ones never do by themselves."""
    torch.manual_seed(2)
    inputs = FP8_GROUPS if block else FP8_TENSOR
    config = QuantizationConfig(
        layout="fp8", bits=8, group_size=None, granularity=granularity, block_shape=block, inputs=inputs
    )
    weight, x = torch.randn(40, 200).to(torch.float8_e4m3fn), torch.randn(3, 200)
    scale, given = torch.rand((1, 2) if block else (1,)) + 0.5, torch.tensor([0.0 if block else 0.013])
    (ours,) = (each for each in backends() if each.op is ops.fp8_linear)
    with replaced_backends([dataclasses.replace(ours, priority=10)]):
        layer = StoredLinear(config, OpRequest(dtype=torch.float32), "layer", 40, 200)
        assert ("input_scale" in layer.tensors()) == (block is None)
        stored = {"weight": weight, "weight_scale": scale} | ({} if block else {"input_scale": given})
        weights = layer.read(stored, None)
        assert layer.op == "fp8_linear"
        got = layer.apply(weights, x)
    wanted = ref.fp8_linear(x, weight, scale.expand(40, 2 if block else 1), given, None)
    assert (got - wanted).abs().max() <= TOLERANCE[torch.float32] * wanted.abs().max()
    plain = x @ (weight.float() * (scale.repeat_interleave(128, 1)[:, :200] if block else scale)).T
    assert 1e-4 < (got - plain).abs().max() / plain.abs().max() < 0.1, "inputs are rounded, and no more than that"
