"""Matrices, norms and activations against the reference in float64, and rows that depend on nothing but themselves."""

from __future__ import annotations

import pytest
import torch

from quire_kernels_cpu import ops
from quire_kernels_cpu.builds import build_name
from quire_ops import ops as reference
from quire_ops.block_formats import BLOCK_FORMATS, decode_blocks
from quire_ops.grouped import GROUP_SIZES, block_groups, pack_int4
from quire_testkit.random_blocks import random_blocks

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
SHAPES = [
    (1, 64, 64),
    (3, 96, 50),
    (17, 1024, 100),
    (33, 512, 7),
    (1, 40, 33),
    (100, 70, 129),
    (65, 3072, 48),
    (600, 1088, 96),
]


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("tokens", "cols", "rows"), SHAPES)
def test_linear_equals_the_reference_and_each_row_alone(dtype: torch.dtype, tokens: int, cols: int, rows: int) -> None:
    torch.manual_seed(tokens)
    x, weight, bias = (
        torch.randn(tokens, cols).to(dtype),
        torch.randn(rows, cols).to(dtype),
        torch.randn(rows).to(dtype),
    )
    for b in (None, bias):
        got = ops.linear(x, weight, b)
        assert got.dtype == dtype
        assert relative_error(got, reference.linear(x.double(), weight, b)) <= TOLERANCE[dtype]
    alone = torch.cat([ops.linear(row, weight, bias) for row in x.split(1)])
    assert torch.equal(got, alone)
    logits = ops.lm_head(x, weight)
    assert logits.dtype == torch.float32
    assert relative_error(logits, x.double() @ weight.double().T) <= 1e-6
    ids, max_logits = ops.lm_head_argmax(x, weight)
    assert torch.equal(max_logits, logits.amax(dim=1))
    assert torch.equal(ids, logits.argmax(dim=1))


GROUP_SHAPES = [(1, 64, 64), (70, 1024, 50), (1, 40, 33), (65, 70, 79), (9, 192, 31)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("tokens", "cols", "rows"), GROUP_SHAPES)
@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("group", GROUP_SIZES)
def test_groups_equal_the_reference_and_each_row_alone(
    dtype: torch.dtype, tokens: int, cols: int, rows: int, kind: str, group: int
) -> None:
    torch.manual_seed(tokens + group)
    x, bias = torch.randn(tokens, cols).mul(torch.rand(tokens, 1) * 9).to(dtype), torch.randn(rows).to(dtype)
    if tokens > 1:
        x[0] = 0
    weight = torch.randint(-128, 128, (rows, cols), dtype=torch.int8)
    zero = block_groups(torch.randint(-8, 9, (rows, -(-cols // group)), dtype=torch.int16))
    if kind == "int4":
        weight = pack_int4(weight >> 4)
    if kind == "fp8":  # every code that is a number, those of tiny numbers often
        codes = (weight.view(torch.uint8).clamp(0, 254) % 127) | (weight.view(torch.uint8) & 0x80)
        weight, zero = codes.view(torch.float8_e4m3fn), None
    for scale_dtype in {dtype, torch.float32}:
        scale = block_groups(torch.rand(rows, -(-cols // group)).to(scale_dtype))
        for z, b in ((None, None), (zero, bias)):
            got = ops.grouped_linear(x, weight, scale, z, b)
            expected = reference.grouped_linear(x.double(), weight, scale, z, b)
            assert got.dtype == dtype
            assert relative_error(got, expected) <= 2 * TOLERANCE[dtype]
            alone = [ops.grouped_linear(row, weight, scale, z, b) for row in x.split(1)]
            assert torch.equal(got, torch.cat(alone))
        logits = ops.grouped_linear(x, weight, scale, zero, None, wide=True)
        # In float32 a sum in another order shows; rounded to the network's type it seldom does.
        assert torch.equal(
            logits, torch.cat([ops.grouped_linear(r, weight, scale, zero, None, wide=True) for r in x.split(1)])
        )
        expected = reference.grouped_linear(x.double(), weight, scale, zero, None)
        assert relative_error(logits, expected) <= (1e-6 if dtype == torch.float32 else 2e-4)
    spoilt = x.clone()
    spoilt[-1, -1] = float("nan")
    got = ops.grouped_linear(spoilt, weight, scale, zero, None)
    assert got[-1].isnan().all()
    assert torch.equal(got[:-1], ops.grouped_linear(x, weight, scale, zero, None)[:-1])


def test_every_float8_is_read_exactly() -> None:
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    weight = codes[:, None].repeat(1, 64).view(torch.float8_e4m3fn)
    x = torch.zeros(1, 64)
    x[0, 5] = 1
    scale = block_groups(torch.ones(len(codes), 1))
    for dtype in TOLERANCE:
        got = ops.grouped_linear(x.to(dtype), weight, scale, None, None, wide=True)
        assert torch.equal(got[0], weight[:, 0].float())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("tokens", "cols", "rows"), [*SHAPES, (9, 256, 32), (24, 3072, 40)])
def test_int8_equals_the_reference_and_each_row_alone(dtype: torch.dtype, tokens: int, cols: int, rows: int) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, cols).mul(torch.rand(tokens, 1) * 9).to(dtype)
    x[0] = 0
    x[-1, 0] = 40.0
    weight = torch.randint(-127, 128, (rows, cols), dtype=torch.int8)
    scale, bias = torch.rand(rows).mul(0.02).to(dtype), torch.randn(rows).to(dtype)
    for b in (None, bias):
        got = ops.int8_linear(x, weight, scale, b)
        expected = reference.int8_linear(x.double(), weight, scale, b)
        assert got.dtype == dtype
        error = (got.double() - expected).abs().amax(dim=1) / expected.abs().amax(dim=1).clamp_min(1e-3)
        assert float(error.max()) <= TOLERANCE[dtype]
    assert torch.equal(got, torch.cat([ops.int8_linear(row, weight, scale, bias) for row in x.split(1)]))
    x[tokens // 2, cols // 2] = float("inf")
    spoilt = ops.int8_linear(x, weight, scale, bias)
    assert not spoilt[tokens // 2].isfinite().any() or bool((weight[:, cols // 2] == 0).any())
    others = torch.arange(tokens) != tokens // 2
    assert torch.equal(spoilt[others], got[others])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("tokens", "cols", "rows"), [*SHAPES, (9, 256, 32), (24, 3072, 40)])
def test_w8a8_equals_the_reference_and_each_row_alone(dtype: torch.dtype, tokens: int, cols: int, rows: int) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, cols).mul(torch.rand(tokens, 1) * 9).to(dtype)
    weight = torch.randint(-128, 128, (rows, cols), dtype=torch.int8)
    scale, bias = torch.rand(rows).mul(0.02).to(dtype), torch.randn(rows).to(dtype)
    for input_scale in (torch.zeros(1), torch.tensor([0.05])):
        logits = ops.w8a8_linear(x, weight, scale, input_scale, None, wide=True)
        expected = reference.w8a8_linear(x, weight, scale, input_scale, None, wide=True)
        assert (logits - expected).abs().max() <= 3e-7 * expected.abs().max()
        got = ops.w8a8_linear(x, weight, scale, input_scale, bias)
        assert relative_error(got, expected.double() + bias.double()) <= TOLERANCE[dtype]
        alone = [ops.w8a8_linear(row, weight, scale, input_scale, bias) for row in x.split(1)]
        assert torch.equal(got, torch.cat(alone))


def multiply(kind: str, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Weights [rows, cols] of int8 in the coding `kind`, float32 results."""
    if kind == "plain":
        return ops.lm_head(x, weight.to(x.dtype))
    if kind == "int8":
        return ops.int8_linear(x, weight, scale, None, wide=True)
    if kind == "w8a8":
        return ops.w8a8_linear(x, weight, scale, torch.zeros(1), None, wide=True)
    of_groups = block_groups(scale[:, None].expand(-1, -(-x.shape[1] // 32)).contiguous())
    if kind == "int4":
        return ops.grouped_linear(x, pack_int4(weight >> 4), of_groups, zero, None, wide=True)
    if kind == "fp8":
        return ops.grouped_linear(x, (weight / 16).to(torch.float8_e4m3fn), of_groups, None, None, wide=True)
    return ops.grouped_linear(x, weight, of_groups, zero, None, wide=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("cols", "rows"), [(352, 50), (576, 33), (1024, 7)])
@pytest.mark.parametrize("kind", ["plain", "int8", "w8a8", "int4", "fp8", "group int8"])
def test_a_row_is_the_same_among_any_number_of_others(dtype: torch.dtype, cols: int, rows: int, kind: str) -> None:
    x = torch.randn(50, cols).mul(torch.rand(50, 1) * 9).to(dtype)
    weight = torch.randint(-128, 128, (rows, cols), dtype=torch.int8)
    scale = torch.rand(rows).mul(0.02).to(dtype)
    zero = block_groups(torch.randint(-99, 99, (rows, -(-cols // 32)), dtype=torch.int16))
    together = multiply(kind, x, weight, scale, zero)
    for tokens in range(1, 50):
        assert torch.equal(multiply(kind, x[-tokens:], weight, scale, zero), together[-tokens:])


@pytest.mark.parametrize("tokens", [1, 8, 12, 40])
@pytest.mark.parametrize("element", [-128, 127])
@pytest.mark.parametrize("kind", ["int8", "w8a8", "group int8"])
def test_whole_numbers_as_large_as_there_are_do_not_overflow(tokens: int, element: int, kind: str) -> None:
    x = torch.full((tokens, 2048), 3.0, dtype=torch.bfloat16)
    weight, zero = torch.full((32, 2048), element, dtype=torch.int8), -128 if element > 0 else 127
    zeros = block_groups(torch.full((32, 64), zero, dtype=torch.int16))
    got = multiply(kind, x, weight, torch.ones(32, dtype=torch.bfloat16), zeros)
    expected = 3.0 * 2048 * (element - zero if kind == "group int8" else element)
    torch.testing.assert_close(got, torch.full((tokens, 32), expected), rtol=1e-5, atol=0)


def test_a_weight_is_never_read_past_its_end() -> None:
    """Its last page ends a mapping: one byte further would be a fault."""
    import mmap

    cols = 64
    for rows in (33, 47, 63):
        size = rows * cols * 2
        whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, whole)
        weight = torch.frombuffer(memory, dtype=torch.bfloat16, offset=whole - size).view(rows, cols)
        weight.copy_(torch.randn(rows, cols))
        x = torch.randn(5, cols).bfloat16()
        assert relative_error(ops.linear(x, weight, None), reference.linear(x.double(), weight, None)) <= 4e-3


def behind_a_line(weight: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """The same numbers, beginning so many bytes behind a multiple of 64."""
    memory = torch.empty(weight.nbytes + 128, dtype=torch.uint8)
    begin = -memory.data_ptr() % 64 + num_bytes
    return memory[begin : begin + weight.nbytes].view(weight.dtype).view(weight.shape).copy_(weight)


@pytest.mark.parametrize("kind", ["plain", "int8", "w8a8", "fp8", "group int8"])
@pytest.mark.parametrize("cols", [2048, 4096, 4160])  # rows that share a set of the first-level cache, and others
def test_weights_begin_anywhere_in_memory(kind: str, cols: int) -> None:
    """A file has them behind a header of any length."""
    x = torch.randn(13, cols).bfloat16()
    weight = torch.randint(-127, 128, (70, cols), dtype=torch.int8)
    weight = {"plain": weight.bfloat16(), "fp8": (weight / 16).to(torch.float8_e4m3fn)}.get(kind, weight)
    scale = torch.rand(70).bfloat16()
    of_groups = block_groups(torch.rand(70, -(-cols // 128)).bfloat16())

    def product(tokens: int, stored: torch.Tensor) -> torch.Tensor:
        if kind == "plain":
            return ops.lm_head(x[:tokens], stored)
        if kind == "int8":
            return ops.int8_linear(x[:tokens], stored, scale, None, wide=True)
        if kind == "w8a8":
            return ops.w8a8_linear(x[:tokens], stored, scale, torch.zeros(1), None, wide=True)
        return ops.grouped_linear(x[:tokens], stored, of_groups, None, None, wide=True)

    for tokens in (1, 2, 7, 12, 13):
        expected = product(tokens, behind_a_line(weight, 0))
        if kind == "plain":
            assert relative_error(expected, x[:tokens].double() @ weight.double().T) <= 1e-6
        for num_bytes in (2, 4, 8, 36, 56, 62):
            assert torch.equal(product(tokens, behind_a_line(weight, num_bytes)), expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_no_rows_and_not_contiguous_ones(dtype: torch.dtype) -> None:
    weight = torch.randn(48, 32).to(dtype)
    assert ops.linear(torch.empty(0, 32, dtype=dtype), weight, None).shape == (0, 48)
    x = torch.randn(32, 6).to(dtype).T
    assert torch.equal(ops.linear(x, weight, None), ops.linear(x.contiguous(), weight, None))


def test_not_a_number_stays_in_its_row() -> None:
    x = torch.randn(20, 64).bfloat16()
    x[3, 5] = float("nan")
    got = ops.linear(x, torch.randn(64, 64).bfloat16(), None)
    assert got[3].isnan().all()
    assert got[torch.arange(20) != 3].isfinite().all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1, 7, 16, 100, 1024])
def test_norms_equal_the_reference(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((5, size), (5, size), (size,)))
    expected, total = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert (
        relative_error(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight, 1e-5)) <= TOLERANCE[dtype]
    )
    got, got_total = ops.add_rms_norm(x, residual.clone(), weight, 1e-5)
    assert torch.equal(got_total, total)
    assert relative_error(got, expected.double()) <= 2 * TOLERANCE[dtype]
    heads = torch.randn(3, 4, size).to(dtype)
    assert ops.rms_norm(heads, weight, 1e-5).shape == heads.shape


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
def test_activations_equal_the_reference(dtype: torch.dtype, name: str) -> None:
    gate, up = torch.randn(7, 37).mul(8).to(dtype), torch.randn(7, 37).to(dtype)
    gate[0, :5] = torch.tensor([-100.0, 100.0, -0.0, 88.0, -88.0])
    expected = getattr(reference, name)(gate.double(), up.double())
    assert relative_error(getattr(ops, name)(gate.clone(), up), expected) <= TOLERANCE[dtype]
    many = torch.randn(9, 4000).to(dtype)
    assert (
        relative_error(getattr(ops, name)(many.clone(), many), getattr(reference, name)(many.double(), many.double()))
        <= TOLERANCE[dtype]
    )


def multiplies_blocks(dtype: torch.dtype) -> bool:
    """Whether weights in blocks meet tokens of 15 bits, and are not decoded (`csrc/block_dots.h`)."""
    return dtype == torch.bfloat16 and build_name() in ("avx512vnni", "avx512bf16")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", BLOCK_FORMATS)
def test_weights_in_blocks_give_what_decoded_ones_do(dtype: torch.dtype, form: str) -> None:
    for seed, (outputs, inputs) in enumerate([(5, 256), (100, 768), (64, 1024)]):
        weight, header = random_blocks(form, outputs, inputs, seed)
        decoded = decode_blocks(weight, header)
        for tokens in (1, 3, 17, 70):
            x, bias = torch.randn(tokens, inputs).to(dtype), torch.randn(outputs).to(dtype)
            got, wide = ops.block_linear(x, weight, header, bias), ops.block_linear(x, weight, header, None, wide=True)
            if multiplies_blocks(dtype):  # tokens have 15 bits, numbers of tables 14
                numbers, tokens_of = decoded.double().abs(), x.double().abs()
                exact, steps = x.double() @ decoded.double().T, tokens_of.amax(1, keepdim=True) * numbers.sum(1)
                if form == "TABLE4":
                    steps += tokens_of.sum(1, keepdim=True) * numbers.amax(1)
                assert ((wide - exact).abs() <= steps * 2**-15 * 1.05 + 1e-6 * (tokens_of @ numbers.T)).all()
                assert torch.equal(got, (wide + bias.float()).to(dtype))
                assert torch.equal(wide[-1:], ops.block_linear(x[-1:], weight, header, None, wide=True))
            else:
                assert relative_error(got, reference.block_linear(x, weight, header, bias).double()) < TOLERANCE[dtype]
                assert torch.equal(got, ops.linear(x, decoded.to(dtype), bias))
                assert torch.equal(wide, ops.lm_head(x, decoded.to(dtype)))
