"""Products with plain, int8, fp8 and int4 weights against the reference: odd sizes, few and many rows, splits."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from kernels_cuda_support import DTYPES, check, here, poison, random_tensor

from quire_interfaces import ConfigError
from quire_kernels_cuda.platform import choosing
from quire_kernels_cuda.targets import NVIDIA_TARGETS
from quire_kernels_cuda.triton import linear
from quire_kernels_cuda.triton.matmul import MatmulTile, _four_bits, choose_row_tile, choose_tile, run_matmul
from quire_ops import ops as ref
from quire_ops.grouped import block_groups, pack_int4

TILES = {
    "few rows, splits": MatmulTile(16, 32, 128, 3, 4, 3),
    "many rows": MatmulTile(32, 64, 64, 1, 4, 3),
}
each_tile = pytest.mark.parametrize("tile", TILES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SIZES = [(1, 40, 300), (19, 70, 261)]
ROW_TILES = (MatmulTile(1, 16, 128, 3, 4, 1), MatmulTile(1, 64, 128, 1, 4, 2))
"""For the kernel of one row."""
each_size = pytest.mark.parametrize(("rows", "outputs", "inputs"), SIZES)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    torch.manual_seed(0)
    poison(monkeypatch)


@triton.jit
def four_bits_kernel(bits, out):
    place = tl.arange(0, 16)
    tl.store(out + place, _four_bits(tl.load(bits + place), out.dtype.element_ty))


@each_dtype
def test_numbers_of_four_bits_are_exact(dtype):
    bits, out = here(torch.arange(16, dtype=torch.uint8)), here(torch.zeros(16, dtype=dtype))
    four_bits_kernel[(1,)](bits, out)
    assert out.tolist() == list(range(-8, 8))


@each_dtype
@each_tile
@each_size
def test_plain_weights(dtype, tile, rows, outputs, inputs):
    x, weight, bias = (random_tensor(*shape, dtype=dtype) for shape in ((rows, inputs), (outputs, inputs), (outputs,)))
    options = {"form": "plain", "tile": TILES[tile]}
    got = run_matmul(here(x), here(weight), bias=here(bias), out_dtype=dtype, **options)
    check(got, ref.linear(x, weight, bias), dtype)
    check(run_matmul(here(x), here(weight), out_dtype=torch.float32, **options), ref.lm_head(x, weight))


@each_dtype
@each_tile
@each_size
def test_int8_weights(dtype, tile, rows, outputs, inputs):
    x, bias = random_tensor(rows, inputs + 7, dtype=dtype)[:, :inputs], random_tensor(outputs, dtype=dtype)
    weight, scale = (
        torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8),
        (torch.rand(outputs) * 0.01).to(dtype),
    )
    got = run_matmul(
        here(x), here(weight), form="int8", scale=here(scale), bias=here(bias), out_dtype=dtype, tile=TILES[tile]
    )
    check(got, ref.int8_linear(x, weight, scale, bias), dtype)
    got = linear.int8_linear(here(x), here(weight), here(scale), None, wide=True)
    check(got, ref.int8_linear(x, weight, scale, None, wide=True))


@each_dtype
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("kind", ["int4", "int4 with zeros", "int8 with zeros", "fp8"])
def test_weights_in_groups(dtype, group, kind):
    for (rows, outputs, inputs), tile in zip(SIZES, TILES.values(), strict=True):
        x, bias = random_tensor(rows, inputs, dtype=dtype), random_tensor(outputs, dtype=dtype)
        groups = (outputs, -(-inputs // group))
        scale = block_groups((torch.rand(groups) * 0.02).to(dtype if kind != "fp8" else torch.float32))
        zero = block_groups(torch.randint(-7, 8, groups, dtype=torch.int16)) if kind.endswith("zeros") else None
        if kind == "fp8":
            weight = torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8)
            weight[weight & 0x7F == 0x7F] = 0  # no NaN, every other bit pattern
            weight = weight.view(torch.float8_e4m3fn)
        elif kind.startswith("int8"):
            weight = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
        else:
            weight = pack_int4(torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8))
        got = run_matmul(
            here(x), here(weight), form=kind.split()[0], scale=here(scale), zero=here(zero), bias=here(bias),
            out_dtype=dtype, tile=tile,
        )  # fmt: skip
        check(got, ref.grouped_linear(x, weight, scale, zero, bias), dtype)
        for tile in ROW_TILES if kind.startswith("int4") else ():
            options = {"form": "int4", "scale": here(scale), "zero": here(zero), "out_dtype": dtype, "tile": tile}
            got = run_matmul(here(x[:1]), here(weight), bias=here(bias), **options)
            check(got, ref.grouped_linear(x[:1], weight, scale, zero, bias), dtype)
        got = linear.grouped_linear(here(x), here(weight), here(scale), here(zero), None, wide=True)
        check(got, ref.grouped_linear(x, weight, scale, zero, None, wide=True))


def test_products_that_nobody_measured_go_to_torch():
    x, weight, bias = random_tensor(3, 64), random_tensor(20, 64), random_tensor(20)
    got = linear.linear(here(x), here(weight), here(bias))
    assert torch.equal(got, torch.nn.functional.linear(here(x), here(weight), here(bias)))
    for rows in (3, 40):  # of few rows and of many
        x, weight = random_tensor(rows, 64).bfloat16(), random_tensor(20, 64).bfloat16()
        check(linear.lm_head(here(x), here(weight)), ref.lm_head(x, weight))
    assert linear.lm_head(here(x[:0]), here(weight)).shape == (0, 20)


def test_an_unknown_weight_is_refused():
    scale = torch.ones(1, 1, 16)
    with pytest.raises(ConfigError, match="uint8, int8 or float8_e4m3fn"):
        linear.grouped_linear(torch.ones(1, 32), torch.ones(1, 32), scale, None, None)


def test_the_kernel_of_one_row_serves_one_row_of_int4_alone(monkeypatch):
    """A table of tuned configurations answers for the nearest problem, of another number of rows, too."""
    row = MatmulTile(1, 16, 128, 1, 4, 1).config
    weight, scale = pack_int4(torch.randint(-8, 8, (20, 64), dtype=torch.int8)), block_groups(torch.rand(20, 1))
    with choosing(lambda problem, otherwise: row):
        for rows in (1, 2):
            x = random_tensor(rows, 64)
            got = linear.grouped_linear(here(x), here(weight), here(scale), None, None)
            check(got, ref.grouped_linear(x, weight, scale, None, None))


def test_tiles_keep_a_gpu_busy():
    sm_90 = NVIDIA_TARGETS["sm_90"]
    row = choose_row_tile(4096, 4096, 132)
    assert row.num_splits * 4096 // row.outputs >= 2 * 132
    assert choose_tile(1, 4096, 4096, 132, sm_90).rows == 16
    assert choose_tile(1, 128256, 4096, 132, sm_90).num_splits == 1
    assert choose_tile(1, 4096, 256, 132, sm_90).num_splits == 1
    assert choose_tile(4096, 4096, 4096, 132, sm_90)[:2] == (128, 128)


@pytest.mark.parametrize(
    ("outputs", "inputs", "of_row", "of_few"),
    [
        (4096, 14336, 8, (2, 4)), (4096, 4096, 8, (1, 2)), (6144, 4096, 4, (1, 1)), (28672, 4096, 1, (1, 1)),
        (1024, 3072, 4, (4, 4)), (1024, 2048, 4, (1, 1)), (4096, 1024, 1, (1, 1)), (6144, 1024, 1, (1, 1)),
    ],
)  # fmt: skip
def test_inputs_are_divided_where_that_saves_more_than_a_launch(outputs, inputs, of_row, of_few) -> None:
    """Products of an 8B and a 0.6B network on an H100: one row of int4, and 16 of int4 and of int8."""
    target = NVIDIA_TARGETS["sm_90"]
    assert choose_row_tile(outputs, inputs, 132).num_splits == of_row
    few = [choose_tile(16, outputs, inputs, 132, target, weight_bytes=each).num_splits for each in (0.5, 1.0)]
    assert tuple(few) == of_few
