"""Every backend of every elementwise and matrix op against the reference, on random inputs, every supported dtype."""

from __future__ import annotations

import random as random_module

import numpy as np
import pytest
import torch
from ops_conformance import cases, check, check_wide, random, serving
from torch import Tensor

from quire_ops import OpBackend, RowTable, ops
from quire_ops import ops as ref
from quire_ops.block_formats import BLOCK_FORMATS, E2M1_VALUES, decode_blocks
from quire_ops.grouped import GROUP_SIZES, block_groups, dequantize, pack_int4, unblock_groups, unpack_int4
from quire_testkit.random_blocks import random_blocks


@cases(ops.linear)
@pytest.mark.parametrize("rows", [0, 1, 3, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(backend: OpBackend, dtype: torch.dtype, rows: int, bias: bool) -> None:
    x, weight = random(rows, 70, dtype=dtype), random(33, 70, dtype=dtype, seed=1)
    offset = random(33, dtype=dtype, seed=2) if bias else None
    if rows == 0:
        assert backend.function(x, weight, offset).shape == (0, 33)
        return
    check(backend.function(x, weight, offset), ref.linear(x, weight, offset))


@cases(ops.head_linear)
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("shape", [(5, 33, 70), (16, 64, 32), (1, 1, 3)])
def test_head_linear(backend: OpBackend, dtype: torch.dtype, rows: int, shape: tuple[int, int, int]) -> None:
    heads, outputs, inputs = shape
    x, weight = random(rows, heads, inputs + 2, dtype=dtype), random(heads, outputs + 4, inputs, dtype=dtype, seed=1)
    for tokens in (x[..., :inputs], x[..., 2:].contiguous()):
        for of_heads in (weight[:, 4:], weight.transpose(1, 2).contiguous().transpose(1, 2)[:, 4:]):
            check(backend.function(tokens, of_heads), ref.head_linear(tokens, of_heads))


def whole_numbers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Of which sums are exact in every order, so that equal logits, of which there are many, are equal indeed."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@cases(ops.lm_head_argmax)
@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("shape", [(33, 64), (1, 32), (2000, 96), (515, 70)])
def test_lm_head_argmax(backend: OpBackend, dtype: torch.dtype, rows: int, shape: tuple[int, int]) -> None:
    x, weight = whole_numbers(rows, shape[1], dtype=dtype, seed=rows), whole_numbers(*shape, dtype=dtype, seed=9)
    ids, max_logits = backend.function(x, weight)
    wanted_ids, wanted_peaks = ref.lm_head_argmax(x, weight)
    assert torch.equal(ids, wanted_ids)
    assert torch.equal(max_logits, wanted_peaks)
    assert ids.dtype == torch.int64
    assert max_logits.dtype == torch.float32


@cases(ops.lm_head_argmax)
def test_lm_head_argmax_of_what_is_no_number(backend: OpBackend, dtype: torch.dtype) -> None:
    x, weight = whole_numbers(20, 64, dtype=dtype, seed=0), whole_numbers(300, 64, dtype=dtype, seed=1)
    wanted_ids, wanted_peaks = ref.lm_head_argmax(x, weight)
    x[3] = torch.nan
    x[7, 5] = torch.inf
    ids, max_logits = backend.function(x, weight)
    sound = [i for i in range(20) if i not in (3, 7)]
    assert torch.equal(ids[sound], wanted_ids[sound])
    assert torch.equal(max_logits[sound], wanted_peaks[sound])
    assert max_logits[3].isnan()
    assert not max_logits[7].isfinite()
    assert ((ids >= 0) & (ids < 300)).all()
    # Every logit -inf: the first token, and a max_logit that says so.
    weight = torch.full((300, 64), -torch.inf, dtype=dtype)
    ids, max_logits = backend.function(torch.ones(2, 64, dtype=dtype), weight)
    assert ids.tolist() == [0, 0]
    assert max_logits.tolist() == [-torch.inf, -torch.inf]


@pytest.mark.parametrize("backend", serving(ops.step_inputs))
@pytest.mark.parametrize("seed", range(20))
def test_step_inputs(backend: OpBackend, seed: int) -> None:
    rng = random_module.Random(seed)
    num_rows, row_len = 7, 50
    token_ids = torch.arange(num_rows * row_len, dtype=torch.int32).view(num_rows, row_len)
    tables = tuple(
        RowTable(torch.randint(1, 999, (num_rows, -(-row_len // size)), dtype=torch.int32), size, window)
        for size, window in ((rng.choice([1, 4, 16]), None), (rng.choice([1, 2, 8]), rng.randint(1, 20)))
    )[: rng.randint(1, 2)]
    rows = np.array(rng.sample(range(num_rows), rng.randint(1, num_rows)))
    starts = np.array([rng.randrange(row_len) for _ in rows])
    is_decode = seed % 2
    ends = np.array([start + 1 if is_decode else rng.randint(start + 1, row_len) for start in starts.tolist()])
    got = backend.function(token_ids, tables, rows, starts, ends)
    wanted = ref.step_inputs(token_ids, tables, rows, starts, ends)
    for mine, theirs in zip((*got[:4], *sum(got.groups, ())), (*wanted[:4], *sum(wanted.groups, ())), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("backend", serving(ops.decode_inputs))
@pytest.mark.parametrize("seed", range(10))
def test_decode_inputs(backend: OpBackend, seed: int) -> None:
    rng = random_module.Random(seed)
    num_rows, row_len = 7, 50
    token_ids = torch.randint(1 << 31, (num_rows, row_len), dtype=torch.int32)
    tables = tuple(
        RowTable(torch.randint(1, 999, (num_rows, -(-row_len // size)), dtype=torch.int32), size, window)
        for size, window in ((rng.choice([1, 4, 16]), None), (rng.choice([1, 2, 8]), rng.randint(1, 20)))
    )
    rows = [rng.randrange(num_rows) for _ in range(rng.randint(1, 9))]
    starts = [rng.randrange(row_len) for _ in rows]
    lens, num_tokens = [1] * len(rows), None
    if seed % 2:  # sequences of any number of tokens, the last one of some
        lens = [rng.randint(0, min(4, row_len - start)) for start in starts]
        lens[-1] = max(lens[-1], 1)
        num_tokens = sum(lens)
    ends = [start + length for start, length in zip(starts, lens, strict=True)]
    spans = torch.tensor([rows, starts, ends, [sum(lens[:i]) for i in range(len(rows))]])
    got = backend.function(token_ids, tables, spans, num_tokens)
    wanted = ref.decode_inputs(token_ids, tables, spans, num_tokens)
    for mine, theirs in zip((*got[:4], *sum(got.groups, ())), (*wanted[:4], *sum(wanted.groups, ())), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


@cases(ops.int8_linear)
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 64])
@pytest.mark.parametrize("shape", [(48, 64), (16, 32), (31, 64), (32, 70), (1, 8), (2000, 640)])
def test_int8_linear(backend: OpBackend, dtype: torch.dtype, rows: int, shape: tuple[int, int]) -> None:
    x = random(rows, shape[1], dtype=dtype)
    weight = torch.randint(-127, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(rows))
    scale = random(shape[0], dtype=dtype, seed=3).abs() * 0.01
    offset = random(shape[0], dtype=dtype, seed=4)
    check(backend.function(x, weight, scale, None), ref.int8_linear(x, weight, scale, None))
    check(backend.function(x, weight, scale, offset), ref.int8_linear(x, weight, scale, offset))
    wide = backend.function(x, weight, scale, None, wide=True)
    check_wide(wide, ref.int8_linear(x, weight, scale, None, wide=True), dtype)


@cases(ops.w8a8_linear)
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("shape", [(48, 64), (31, 200), (16, 1), (33, 1024), (500, 640)])
def test_w8a8_linear(backend: OpBackend, dtype: torch.dtype, rows: int, shape: tuple[int, int]) -> None:
    x = random(rows, shape[1], dtype=dtype) * torch.arange(rows).add(0.5).to(dtype)[:, None]
    weight = torch.randint(-128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(rows))
    scale = random(shape[0], dtype=dtype, seed=3).abs() * 0.01
    offset = random(shape[0], dtype=dtype, seed=4)
    for input_scale in (
        torch.zeros(1),
        torch.tensor([0.013]),
    ):  # of its own for each row; so small that some are cut off
        got = backend.function(x, weight, scale, input_scale, offset)
        check(got, ref.w8a8_linear(x, weight, scale, input_scale, offset))
        wide = backend.function(x, weight, scale, input_scale, None, wide=True)
        exact = ref.w8a8_linear(x, weight, scale, input_scale, None, wide=True)
        assert wide.dtype == torch.float32
        assert (wide - exact).abs().max() <= 3e-7 * exact.abs().max()


@cases(ops.w8a8_linear)
def test_tokens_that_w8a8_cannot_hold(backend: OpBackend, dtype: torch.dtype) -> None:
    x = torch.randn(5, 64).to(dtype)
    x[1], x[2, 3], x[3, 60], x[4] = 0, torch.nan, -torch.inf, 0
    if dtype != torch.float16:
        x[4, 0] = 1e-38  # 127 / x overflows
    weight, scale = torch.randint(-127, 128, (40, 64), dtype=torch.int8), torch.rand(40).to(dtype)
    got = backend.function(x, weight, scale, torch.zeros(1), None)
    assert got[2:4].isnan().all()
    assert torch.equal(got[[1, 4]], torch.zeros(2, 40, dtype=dtype))
    assert got[0].isfinite().all()


@cases(ops.grouped_linear)
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("shape", [(48, 64), (31, 200), (16, 1), (33, 1024), (1000, 640)])
@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_grouped_linear(backend: OpBackend, dtype: torch.dtype, rows: int, shape: tuple[int, int], kind: str) -> None:
    x, size = random(rows, shape[1], dtype=dtype), GROUP_SIZES[rows % 3]
    elements = torch.randint(-8, 8, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(rows))
    if kind == "int4":
        weight = pack_int4(elements)
    else:
        weight = elements * 16 if kind == "int8" else (random(*shape, dtype=dtype) * 3).to(torch.float8_e4m3fn)
    groups = (shape[0], -(-shape[1] // size))
    scale = block_groups(random(*groups, dtype=dtype, seed=3).abs() * 0.01)
    zero = None if kind == "fp8" else block_groups(torch.arange(groups[0] * groups[1]).view(groups).short() % 17 - 8)
    offset = random(shape[0], dtype=dtype, seed=4)
    for used in (scale, scale.float()):
        check(backend.function(x, weight, used, None, None), ref.grouped_linear(x, weight, used, None, None))
        check(backend.function(x, weight, used, zero, offset), ref.grouped_linear(x, weight, used, zero, offset))
        wide = backend.function(x, weight, used, zero, None, wide=True)
        check_wide(wide, ref.grouped_linear(x, weight, used, zero, None, wide=True), dtype)


@pytest.mark.parametrize(
    "form", [form for form, layout in BLOCK_FORMATS.items() if form not in ("NVFP4", "TABLE4") and not layout.grid]
)
def test_blocks_of_ggml_are_decoded_to_the_bit(form: str) -> None:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not here: types of ggml were NOT compared with it")
    weight, header = random_blocks(form, 16, 1024)
    wanted = gguf.quants.dequantize(weight.numpy(), gguf.GGMLQuantizationType[form])
    assert torch.equal(decode_blocks(weight, header), torch.from_numpy(wanted))


def test_blocks_of_two_constants_and_of_a_table() -> None:
    """By loops over bytes, from the published layouts."""
    for form, seed in (("NVFP4", 0), ("NVFP4", 1), ("TABLE4", 0)):
        weight, header = random_blocks(form, 2, 64, seed)
        layout, wanted = BLOCK_FORMATS[form], []
        for block in weight.view(-1, layout.num_bytes):
            data = bytes(block.tolist())
            if form == "TABLE4":
                parts, scale = (data[4:20], data[20:]), block[:4].view(torch.float32)[0]
                numbers = [byte >> 4 * half & 15 for part in parts for half in (0, 1) for byte in part]
                wanted += [header[1 + number] * scale for number in numbers]
                continue
            for half, scale in enumerate(block[:2].view(torch.float8_e4m3fn).float()):
                scale = scale / header[1] if header[2] else scale * header[1]
                wanted += [E2M1_VALUES[byte >> 4 * half & 15] * scale for byte in data[2:]]
        assert torch.equal(decode_blocks(weight, header).flatten(), torch.stack(wanted))


@pytest.mark.parametrize("shape", [(3, 1), (16, 128), (5, 129), (17, 300)])
def test_int4_is_packed_losslessly(shape: tuple[int, int]) -> None:
    elements = torch.randint(-8, 8, shape, dtype=torch.int8)
    packed = pack_int4(elements)
    assert packed.shape == (shape[0], -(-shape[1] // 128) * 64)
    assert torch.equal(unpack_int4(packed, shape[1]), elements)
    for size in GROUP_SIZES:
        values = torch.randn(shape[0], -(-shape[1] // size))
        assert torch.equal(unblock_groups(block_groups(values), shape[0]), values)
        scale = block_groups(values)
        wanted = elements * values.repeat_interleave(size, dim=1)[:, : shape[1]]
        assert torch.equal(dequantize(packed, scale, None, shape[1], torch.float32), wanted)


@cases(ops.embedding)
def test_embedding(backend: OpBackend, dtype: torch.dtype) -> None:
    weight = random(50, 24, dtype=dtype)
    ids = torch.tensor([0, 49, 7, 7, 3])
    assert torch.equal(backend.function(ids, weight), ref.embedding(ids, weight))


@cases(ops.rms_norm)
@pytest.mark.parametrize("shape", [(1, 64), (7, 33), (5, 3, 16)])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_rms_norm(backend: OpBackend, dtype: torch.dtype, shape: tuple[int, ...], scale: float) -> None:
    x, weight = random(*shape, dtype=dtype) * scale, random(shape[-1], dtype=dtype, seed=1)
    check(backend.function(x, weight, 1e-5), ref.rms_norm(x, weight, 1e-5))


@cases(ops.layer_norm)
@pytest.mark.parametrize("shape", [(1, 64), (7, 33), (5, 3, 16)])
def test_layer_norm(backend: OpBackend, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = random(*shape, dtype=dtype) + 3
    weight, offset = random(shape[-1], dtype=dtype, seed=1), random(shape[-1], dtype=dtype, seed=2)
    for weights in ((weight, offset), (weight, None), (None, None)):
        check(backend.function(x, *weights, 1e-5), ref.layer_norm(x, *weights, 1e-5))


@cases(ops.add_rms_norm)
def test_add_rms_norm(backend: OpBackend, dtype: torch.dtype) -> None:
    x, residual, weight = (random(9, 40, dtype=dtype), random(9, 40, dtype=dtype, seed=1), random(40, dtype=dtype))
    wanted_normed, wanted_total = ref.add_rms_norm(x, residual, weight, 1e-6)
    before = x.clone()
    normed, total = backend.function(x, residual, weight, 1e-6)
    check(normed, wanted_normed)
    check(total, wanted_total)
    assert torch.equal(x, before)


@cases(ops.rotary_embedding)
@pytest.mark.parametrize("head_dim", [2, 16, 128])
def test_rotary_embedding(backend: OpBackend, dtype: torch.dtype, head_dim: int) -> None:
    x = random(6, 3, head_dim, dtype=dtype)
    angles = random(6, head_dim // 2, dtype=torch.float32, seed=2) * 100
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)[:, None]
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)[:, None]
    wanted = ref.rotary_embedding(x, cos, sin)
    check(backend.function(x, cos, sin), wanted)
    # A rotation keeps lengths: the reference itself is checked against that.
    assert torch.allclose(wanted.double().norm(dim=-1), x.double().norm(dim=-1), rtol=2e-2)


@cases(ops.sigmoid_and_mul)
def test_sigmoid_and_mul(backend: OpBackend, dtype: torch.dtype) -> None:
    gate, up = random(5, 30, dtype=dtype) * 4, random(5, 30, dtype=dtype, seed=1)
    one = gate[:, :1].clone()  # for all of a row
    wanted, before = ref.sigmoid_and_mul(gate, up), up.clone()
    check(backend.function(gate, up), wanted)
    wanted = ref.sigmoid_and_mul(one, up)
    check(backend.function(one, up), wanted)
    assert torch.equal(up, before)


@cases(ops.silu_and_mul)
def test_silu_and_mul(backend: OpBackend, dtype: torch.dtype) -> None:
    gate, up = random(5, 30, dtype=dtype) * 4, random(5, 30, dtype=dtype, seed=1)
    wanted, before = ref.silu_and_mul(gate, up), up.clone()
    check(backend.function(gate, up), wanted)
    assert torch.equal(up, before)


@cases(ops.gelu_and_mul)
def test_gelu_and_mul(backend: OpBackend, dtype: torch.dtype) -> None:
    gate, up = random(5, 30, dtype=dtype) * 4, random(5, 30, dtype=dtype, seed=1)
    wanted, before = ref.gelu_and_mul(gate, up), up.clone()
    check(backend.function(gate, up), wanted)
    assert torch.equal(up, before)
