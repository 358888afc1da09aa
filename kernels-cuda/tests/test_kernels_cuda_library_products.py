"""Many rows in int8 and fp8 by torch's library: the references' numbers, and our kernel wherever it does not serve."""

from __future__ import annotations

import pytest
import torch
from kernels_cuda_support import DEVICE, TOLERANCE, here, poison

from quire_kernels_cuda import library_products
from quire_kernels_cuda.platform import NVIDIA, LaunchConfig, choosing, pretending
from quire_kernels_cuda.targets import NVIDIA_TARGETS
from quire_kernels_cuda.triton import fp8, w8a8
from quire_ops import ActivationScheme, QuantizedTokens
from quire_ops import ops as ref
from quire_ops.activation_quant import quantize_tokens

ROWS, OUTPUTS, INPUTS = 260, 64, 256
FP8 = torch.float8_e4m3fn
THIS = torch.zeros(1, device=DEVICE).device
needs_fp8 = pytest.mark.skipif(
    DEVICE == "cuda" and not NVIDIA.target_of(torch.device("cuda", 0)).has_fp8, reason="this GPU has no fp8"
)


def tokens(dtype: torch.dtype, *, by_group: bool = False, inputs: int = INPUTS) -> QuantizedTokens:
    """Rows of several magnitudes, one of zeros and one that is not finite, rounded already."""
    x = torch.randn(ROWS, inputs) * torch.tensor([1, 1e-3, 30])[torch.arange(ROWS) % 3, None]
    x[4], x[5, 3] = 0.0, float("inf")
    return quantize_tokens(x.bfloat16(), ActivationScheme(dtype, torch.zeros(1), by_group))


def first(x: QuantizedTokens, rows: slice) -> QuantizedTokens:
    return QuantizedTokens(x.tokens[rows], x.scales[rows], x.dtype)


def is_near(got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> bool:
    """By the largest result of each row; the one that is not finite is NaN."""
    assert got.dtype == wanted.dtype
    assert got[5].isnan().all()
    kept = torch.arange(ROWS) != 5
    got, wanted = got.cpu().double()[kept], wanted.double()[kept]
    return bool(((got - wanted).abs().amax(1) <= tolerance * wanted.abs().amax(1)).all())


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the bit, NaN included."""
    return torch.equal(one.nan_to_num(-1.0), other.nan_to_num(-1.0))


@pytest.mark.parametrize(("has_bias", "wide"), [(True, False), (False, True)])
def test_int8_by_the_library(monkeypatch, has_bias: bool, wide: bool) -> None:
    """In pieces, and each row has the bits that our kernel gives it alone."""
    torch.manual_seed(0)
    x, weight = tokens(torch.int8), torch.randint(-127, 128, (OUTPUTS, INPUTS), dtype=torch.int8)
    scale, bias = torch.rand(OUTPUTS).bfloat16(), torch.randn(OUTPUTS).bfloat16() if has_bias else None
    given = (weight, scale, torch.zeros(1), bias)
    alone = w8a8.w8a8_linear(*here((first(x, slice(7, 8)), *given)), wide=wide)
    assert library_products.is_served("int8", THIS, NVIDIA)
    poison(monkeypatch)
    monkeypatch.setattr(library_products, "MANY_ROWS", 128)
    monkeypatch.setattr(w8a8, "_SUM_BYTES", 4 * OUTPUTS * 100)
    monkeypatch.setattr(w8a8, "w8a8_kernel", None)
    got = w8a8.w8a8_linear(*here((x, *given)), wide=wide)
    wanted = ref.w8a8_linear(x, *given, wide=wide)
    assert is_near(got, wanted, TOLERANCE[torch.float32 if wide else torch.bfloat16])
    assert torch.equal(got[7:8], alone)


@needs_fp8
@pytest.mark.parametrize("has_bias", [False, True])
def test_fp8_by_the_library(monkeypatch, has_bias: bool) -> None:
    torch.manual_seed(1)
    x, weight = tokens(FP8), torch.randn(OUTPUTS, INPUTS).to(FP8)
    given = (weight, torch.rand(OUTPUTS, 1), torch.zeros(1), torch.randn(OUTPUTS).bfloat16() if has_bias else None)
    assert library_products.is_served("fp8", THIS, NVIDIA)
    monkeypatch.setattr(fp8, "fp8_kernel", None)
    got = fp8.fp8_linear(*here((x, *given)))
    assert is_near(got, ref.fp8_linear(x, *given), TOLERANCE[torch.bfloat16])
    with pytest.raises(TypeError):  # our kernel writes what is not bfloat16
        fp8.fp8_linear(*here((x, *given)), wide=True)


@needs_fp8
def test_fp8_in_groups_where_the_library_has_them(monkeypatch) -> None:
    """It does for one kind of GPU. Everywhere scales are given as cuBLASLt reads them, those of a group side by side
    (torch/aten/src/ATen/native/cuda: 1x128 with 1x128)."""
    torch.manual_seed(2)
    x, weight = tokens(FP8, by_group=True), torch.randn(OUTPUTS, INPUTS).to(FP8)
    given = (weight, torch.rand(OUTPUTS, 2), torch.zeros(1), None)
    got = fp8.fp8_linear(*here((x, *given)))
    assert is_near(got, ref.fp8_linear(x, *given), TOLERANCE[torch.bfloat16])
    if DEVICE == "cpu":
        assert not library_products.is_served("fp8-groups", THIS, NVIDIA)
    seen = []

    def scaled_mm(left, right, *, scale_a, scale_b, bias, out_dtype):
        of_rows, of_outputs = scale_a, scale_b.t()
        for scales, rows in ((of_rows, len(left)), (of_outputs, right.shape[1])):
            assert scales.shape == (rows, 2)
            assert scales.stride() == (1, rows)
        left, right = (
            (each.double() * scales.double().repeat_interleave(128, dim=1))
            for each, scales in ((left, of_rows), (right.t(), of_outputs))
        )
        seen.append(bias)
        return (left @ right.T).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(library_products, "_states", {})
    monkeypatch.setattr(fp8, "fp8_kernel", None)
    got = fp8.fp8_linear(*here((x, *given)))
    assert is_near(got, ref.fp8_linear(x, *given), TOLERANCE[torch.bfloat16])
    assert len(seen) == 2, "a small product to find out, and this one"


def test_our_kernel_serves_what_the_library_does_not() -> None:
    takes = library_products.takes
    assert takes("int8", 256, 64, 272)
    assert takes("fp8-groups", 256, 64, 256)
    for sizes in ((255, 64, 256), (256, 72, 256), (256, 64, 264)):
        assert not takes("int8", *sizes)
    assert not takes("fp8-groups", 256, 64, 272)
    with pretending(NVIDIA_TARGETS["sm_90"]):  # nothing is tried for a GPU that is not here
        assert not library_products.is_served("int8", THIS, NVIDIA)
    assert library_products._why_not("fp8", THIS, NVIDIA) is None
    assert "tried on NVIDIA" in library_products.report(THIS, NVIDIA) or "fp8 with scales of rows" in (
        library_products.report(THIS, NVIDIA)
    )


def test_a_library_that_fails_is_left_out(monkeypatch, caplog) -> None:
    """At once where it gives something else, and from a failure on."""
    torch.manual_seed(3)
    x, weight = tokens(torch.int8, inputs=32), torch.randint(-127, 128, (32, 32), dtype=torch.int8)
    given = (weight, torch.rand(32).bfloat16(), torch.zeros(1), None)
    wanted = w8a8.w8a8_linear(*here((x, *given)))
    library = torch._int_mm
    monkeypatch.setattr(library_products, "_states", {})

    def failing(left, right, **options):
        if options:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nwhen calling")
        return library(left, right)

    monkeypatch.setattr(torch, "_int_mm", failing)
    for _ in range(2):
        assert same(w8a8.w8a8_linear(*here((x, *given))), wanted)
    assert [record.message for record in caplog.records] == [
        "torch's product of int8 failed and is left out from now on: CUBLAS_STATUS_NOT_SUPPORTED"
    ]
    monkeypatch.setattr(library_products, "_states", {})
    monkeypatch.setattr(torch, "_int_mm", lambda left, right: library(left, right) + 1)
    assert not library_products.is_served("int8", THIS, NVIDIA)
    assert "away" in library_products.report(THIS, NVIDIA)


def test_our_kernel_where_it_was_measured_to_be_faster(monkeypatch) -> None:
    """Whatever the library serves, a table's tiles are launched for the very problem that it has."""
    torch.manual_seed(4)
    x, weight = first(tokens(torch.int8, inputs=32), slice(256)), torch.randint(-127, 128, (32, 32), dtype=torch.int8)
    given = here((x, weight, torch.rand(32), torch.zeros(1), None))
    wanted, asked = w8a8.w8a8_linear(*given), []
    config = LaunchConfig(blocks={"BM": 128, "BN": 64, "BK": 64}, num_warps=8, num_stages=2)
    monkeypatch.setattr(torch, "_int_mm", None)
    with choosing(lambda problem, otherwise: asked.append((problem, otherwise)) or config):
        assert same(w8a8.w8a8_linear(*given), wanted)
    ((problem, otherwise),) = asked
    assert otherwise is None
    assert str(problem) == "byte_matmul rows=256 outputs=32 inputs=32 form=int8 dtype=bfloat16"
