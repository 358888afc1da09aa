"""The formats of a paged cache: bits as declared in every backend, and attention over what they stand for."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from ops_layouts import Layout, random_layout

from quire_interfaces import KV_CACHE_DTYPES, kv_row_bytes
from quire_ops import CACHE_TORCH_DTYPES, Op, OpBackend, OpRequest, kv_cache_shape, op_table, ops
from quire_ops import ops as ref
from quire_ops.kv_reference import decode_row, read_row

FORMATS = tuple(KV_CACHE_DTYPES)
SMALL = ("fp8_e4m3", "fp8_e5m2", "int8", "int4")
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def serving(op: Op[..., Any], *, reference: bool = False) -> list[OpBackend]:
    backends = [backend for backend in op_table().backends(op) if reference or backend.name != "reference"]
    return [backend for backend in backends if backend.refusal(OpRequest()) is None]


def empty_cache(name: str, num_blocks: int, block_size: int, heads: int, head_dim: int) -> torch.Tensor:
    """Every bit set: a NaN in each format, or a scale that is one."""
    dtype = CACHE_TORCH_DTYPES[name]
    shape = kv_cache_shape(num_blocks, block_size, heads, kv_row_bytes(name, head_dim) // dtype.itemsize)
    cache = torch.empty(shape, dtype=dtype)
    cache.view(torch.uint8).fill_(255)
    return cache


def awkward(num_tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different size, with zeros, ties, and what is hardly more than nothing."""
    x = torch.randn(num_tokens, heads, head_dim) * torch.logspace(-3, 4, num_tokens)[:, None, None]
    x[0] = 0.0
    x[1] = torch.arange(head_dim) - head_dim // 2  # whole numbers, whose quotients are often halves
    x[2] = torch.full((head_dim,), 1e-39)
    x[3, :, 0], x[3, :, 1] = 127.0, 0.5
    x[4] = 60_000.0 * torch.sign(torch.randn(heads, head_dim))
    return x.to(dtype)


@pytest.mark.parametrize("backend", serving(ops.write_kv_cache), ids=lambda backend: backend.name)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("head_dim", [2, 20, 64])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_bits_are_those_of_the_reference(backend: OpBackend, name: str, head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(head_dim)
    layout, num_blocks = random_layout(random.Random(1), [(9, 11), (1, 5), (14, 14)], 4, shuffle=True)
    key, value = (awkward(24, 3, head_dim, dtype) for _ in range(2))
    scales = (None, torch.tensor([[0.3, 1.7, 11.0], [1.0, 1e-3, 0.07]]))
    for kv_scale in scales:
        wanted, got = (empty_cache(name, num_blocks, 4, 3, head_dim) for _ in range(2))
        ref.write_kv_cache(key, value, wanted, layout.slot_mapping, kv_scale)
        backend.function(key, value, got, layout.slot_mapping, kv_scale)
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("backend", serving(ops.write_kv_cache, reference=True), ids=lambda backend: backend.name)
@pytest.mark.parametrize("name", SMALL)
def test_nan_stays_nan(backend: OpBackend, name: str) -> None:
    key = torch.randn(1, 2, 8)
    key[0, 0, 3] = float("nan")
    cache = empty_cache(name, 1, 1, 2, 8)
    backend.function(key, key.clone(), cache, torch.tensor([0]))
    assert torch.isnan(decode_row(read_row(cache[0, 0, 0], 0), 1.0)[3])
    assert torch.isfinite(decode_row(read_row(cache[0, 0, 1], 0), 1.0)).all()


@pytest.mark.parametrize(("name", "exponent_bits"), [("fp8_e4m3", 4), ("fp8_e5m2", 5)])
def test_fp8_is_the_nearest_number(name: str, exponent_bits: int) -> None:
    """Against all 256 numbers of the format, from its definition (Micikevicius et al. 2022, table 1)."""
    mantissa_bits, bias = 7 - exponent_bits, 2 ** (exponent_bits - 1) - 1
    numbers: dict[int, Fraction] = {}
    for code in range(128):
        exponent, fraction = code >> mantissa_bits, code % (1 << mantissa_bits)
        is_special = code == 127 if name == "fp8_e4m3" else exponent == 31
        if not is_special:
            mantissa = Fraction(fraction, 1 << mantissa_bits) + (exponent > 0)
            numbers[code] = mantissa * Fraction(2) ** (max(exponent, 1) - bias)
    torch.manual_seed(0)
    halves = [
        (float(a) + float(b)) / 2 for a, b in zip(list(numbers.values()), list(numbers.values())[1:], strict=False)
    ]
    x = torch.cat([torch.randn(600) * torch.logspace(-6, 5, 600), torch.tensor([*halves, 1e9, float("inf")])])
    scale = torch.tensor(0.7)
    cache = empty_cache(name, 1, 1, 1, len(x))
    for kv_scale in (None, scale.expand(2, 1)):
        ref.write_kv_cache(x[None, None], -x[None, None], cache, torch.tensor([0]), kv_scale)
        wide = x if kv_scale is None else x / scale
        for exact, plus, minus in zip(wide.tolist(), *cache[0, :, 0, 0].view(torch.uint8).tolist(), strict=True):
            target = Fraction(min(abs(exact), float(max(numbers.values()))))
            nearest = min(numbers, key=lambda code: (abs(numbers[code] - target), code % 2))
            sign = 128 * (exact < 0)
            assert (plus, minus) == (nearest + sign, nearest + 128 - sign), exact


@pytest.mark.parametrize("backend", serving(ops.write_kv_cache, reference=True), ids=lambda backend: backend.name)
def test_division_is_not_multiplication_with_the_inverse(backend: OpBackend) -> None:
    numbers = torch.arange(126, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    scale = np.float32(1.7)
    x = ((numbers[1:] + numbers[:-1]).double().numpy() / 2 * float(scale)).astype(np.float32)
    divided, multiplied = (
        torch.from_numpy(quotient).to(torch.float8_e4m3fn).view(torch.uint8)
        for quotient in (x / scale, x * (np.float32(1) / scale))
    )
    assert not torch.equal(divided, multiplied)
    cache = empty_cache("fp8_e4m3", 1, 1, 1, len(x))
    row = torch.from_numpy(x)[None, None]
    backend.function(row, row, cache, torch.tensor([0]), torch.full((2, 1), float(scale)))
    assert torch.equal(cache[0, 0, 0, 0].view(torch.uint8), divided)


@pytest.mark.parametrize("backend", serving(ops.write_kv_cache, reference=True), ids=lambda backend: backend.name)
@pytest.mark.parametrize(("name", "limit"), [("int8", 127), ("int4", 7)])
def test_integers_are_those_of_numpy(backend: OpBackend, name: str, limit: int) -> None:
    """Each operation rounded once to float32, as IEEE 754 has it."""
    torch.manual_seed(3)
    # Nearly all of them halfway between two whole numbers, where the last bit of a quotient decides.
    halves = (torch.randint(-limit, limit, (500, 1, 64)) + 0.5) / limit
    halves[:, :, 0] = 1.0
    x = (halves.double() * (torch.rand(500, 1, 1) + 0.5) * torch.logspace(-4, 4, 500)[:, None, None]).float()
    cache = empty_cache(name, 1, 500, 1, 64)
    backend.function(x, -x, cache, torch.arange(500))
    wide = x[:, 0].numpy()
    largest = np.abs(wide).max(axis=1, keepdims=True)
    codes = np.rint(wide * (np.float32(limit) / largest)).astype(np.int64)
    keys = cache[0, 0, 0].view(torch.uint8).numpy().reshape(-1)  # all codes, then all scales
    rows, scales = keys[: -4 * 500].reshape(500, -1), keys[-4 * 500 :].view(np.float32)
    assert np.array_equal(scales[:, None], largest / np.float32(limit))
    if name == "int4":
        assert np.array_equal(rows, codes[:, :32] + 8 + 16 * (codes[:, 32:] + 8))
    else:
        assert np.array_equal(rows.view(np.int8), codes)


def test_integers_by_hand() -> None:
    x = torch.tensor([[[-7.0, 3.5, 0.4, 7.0, 1.5, -0.5]]])
    scale = list(torch.tensor([7.0 / 127]).view(torch.uint8).numpy())
    cache = empty_cache("int8", 1, 2, 1, 6)
    ref.write_kv_cache(x, -x, cache, torch.tensor([1]))
    keys = cache[0, 0, 0].flatten()  # the codes of both tokens, then their scales
    assert keys[6:12].tolist() == [-127, 64, 7, 127, 27, -9]  # 63.5 goes to 64
    assert list(keys[16:20].view(torch.uint8).numpy()) == scale
    cache = empty_cache("int4", 1, 2, 1, 6)
    ref.write_kv_cache(x, -x, cache, torch.tensor([1]))
    keys = cache[0, 0, 0].flatten()
    codes = [-7, 4, 0, 7, 2, 0]  # 3.5 and 1.5 go up to even neighbours, -0.5 to zero
    assert keys[3:6].tolist() == [codes[i] + 8 + 16 * (codes[i + 3] + 8) for i in range(3)]
    assert keys[10:14].clone().view(torch.float32).item() == 1.0
    assert decode_row(read_row(cache[0, 1, 0], 1), 1.0).tolist() == [-code for code in codes]


@pytest.mark.parametrize(("name", "limit"), [("int8", 127), ("int4", 7)])
def test_integers_are_off_by_half_a_step_at_most(name: str, limit: int) -> None:
    x = awkward(50, 2, 32, torch.float32)
    cache = empty_cache(name, 1, 50, 2, 32)
    ref.write_kv_cache(x, x, cache, torch.arange(50))
    for token in range(50):
        for head in range(2):
            error = (decode_row(read_row(cache[0, 1, head], token), 1.0) - x[token, head]).abs().max()
            assert error <= x[token, head].abs().max() / limit * 0.5001 + 1e-36


MIXES = {
    "decodes": [(1, 5), (1, 40), (1, 1), (1, 33), (1, 40)],
    "chunks and decodes": [(1, 17), (7, 25), (1, 40), (20, 20), (3, 4), (1, 2)],
}


@pytest.mark.parametrize("backend", serving(ops.paged_attention), ids=lambda backend: backend.name)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("window", "soft_cap", "heads", "block_size", "head_dim"),
    [(None, None, (4, 2), 16, 64), (6, None, (4, 4), 1, 16), (None, 3.0, (6, 2), 8, 6), (8, 5.0, (4, 1), 16, 128)],
)
def test_attention_over_what_the_cache_stands_for(
    backend: OpBackend,
    mix: str,
    name: str,
    dtype: torch.dtype,
    window: int | None,
    soft_cap: float | None,
    heads: tuple[int, int],
    block_size: int,
    head_dim: int,
) -> None:
    rng = random.Random(f"{mix}{window}{name}")
    torch.manual_seed(2)
    layout, num_blocks = random_layout(rng, MIXES[mix], block_size, shuffle=True)
    kv_scale = torch.rand(2, heads[1]) + 0.5 if name.startswith("fp8") else None
    cache = empty_cache(name, num_blocks, block_size, heads[1], head_dim)
    known = known_slots(layout)
    key, value = (torch.randn(len(known), heads[1], head_dim).to(dtype) for _ in range(2))
    ref.write_kv_cache(key, value, cache, known, kv_scale)
    plain = torch.full((num_blocks, 2, heads[1], block_size, head_dim), float("nan"), dtype=torch.float64)
    for slot in known.tolist():
        for which in range(2):
            for head in range(heads[1]):
                at, offset = (slot // block_size, which, head), slot % block_size
                scale = 1.0 if kv_scale is None else float(kv_scale[which, head])
                plain[(*at, offset)] = decode_row(read_row(cache[at], offset), scale)
    query = torch.randn(sum(layout.query_lens), heads[0], head_dim).to(dtype)
    options = {"scale": head_dim**-0.5, "sliding_window": window, "soft_cap": soft_cap}
    wanted = ref.paged_attention(query.double(), plain, layout, **options)
    assert torch.equal(ref.paged_attention(query.double(), cache, layout, kv_scale=kv_scale, **options), wanted), (
        "the reference reads the cache as it was decoded here"
    )
    layout.derived.clear()
    for _ in range(2):
        got = backend.function(query, cache, layout, kv_scale=kv_scale, **options)
        assert got.dtype == dtype
        assert torch.isfinite(got).all()
        assert (got.double() - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max()


def known_slots(layout: Layout) -> torch.Tensor:
    """The slots of all tokens of all sequences."""
    return torch.tensor(
        [
            table[position // layout.block_size] * layout.block_size + position % layout.block_size
            for table, kv_len in zip(layout.block_table.tolist(), layout.kv_lens, strict=True)
            for position in range(kv_len)
        ]
    )
