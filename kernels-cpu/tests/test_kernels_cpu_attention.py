"""Attention against the reference in float64, at awkward shapes; and what happens where the kernel cannot serve."""

from __future__ import annotations

import math
import random

import pytest
import torch
from kernels_cpu_steps import Layout

from quire_attention import AttentionBackend
from quire_kernels_cpu.backend import MAX_HEAD_DIM, MAX_QUERIES_PER_KV_HEAD
from quire_kernels_cpu.builds import build_name, unavailable
from quire_kernels_cpu.ops import backends, paged_attention, write_kv_cache
from quire_ops import OpRequest, op_table, ops
from quire_ops.kv_format import rows_of
from quire_testkit.conformance.attention_backend import AttentionBackendSuite

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, 16), (8, 4, 20), (8, 2, 64), (6, 2, 96), (16, 1, 256)]
)
def test_mixed_steps_equal_the_reference(
    dtype: torch.dtype, block_size: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    chooser = random.Random(f"{block_size}{heads}{head_dim}")
    torch.manual_seed(chooser.randrange(1000))
    query_lens = [chooser.choice([1, 1, 1, 2, 9]) for _ in range(9)]
    kv_lens = [count + chooser.choice([0, 1, 15, 63, 64, 65, 300]) for count in query_lens]
    for window, soft_cap in ((None, None), (1, None), (7, 2.0), (64, None), (None, 5.0)):
        layout = Layout(block_size, query_lens, kv_lens)
        cache = layout.cache(kv_heads, head_dim, dtype)
        query = torch.randn(sum(query_lens), heads, head_dim).to(dtype)
        got = paged_attention(query, cache, layout, scale=head_dim**-0.5, sliding_window=window, soft_cap=soft_cap)
        expected = ops.paged_attention(
            query.double(), cache.double(), layout, scale=head_dim**-0.5, sliding_window=window, soft_cap=soft_cap
        )
        assert got.dtype == dtype
        error = (got.double() - expected).abs().max()
        assert error <= TOLERANCE[dtype], f"window {window}, soft cap {soft_cap}: off by {error:.1e}"


def attended_densely(
    query: torch.Tensor, cache: torch.Tensor, layout: Layout, sinks: torch.Tensor | None, slopes: torch.Tensor | None
) -> torch.Tensor:
    """In float64, one query after another, over a cache that holds numbers."""
    block_size, group = cache.shape[3], query.shape[1] // cache.shape[2]
    out, token = torch.empty_like(query, dtype=torch.float64), 0
    for row, (query_len, kv_len) in enumerate(zip(layout.query_lens, layout.kv_lens, strict=True)):
        positions = torch.arange(kv_len)
        blocks = layout.block_table[row].long()[positions // block_size]
        pairs = cache[blocks, :, :, positions % block_size].double().repeat_interleave(group, 2)  # [L, 2, Hq, D]
        for position in range(kv_len - query_len, kv_len):
            seen = pairs[: position + 1]
            scores = torch.einsum("hd,lhd->hl", query[token].double(), seen[:, 0]) * query.shape[2] ** -0.5
            if slopes is not None:
                scores = scores - slopes[:, None] * (position - positions[: position + 1])
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
            weights = torch.softmax(scores, dim=1)[:, : position + 1]
            out[token] = torch.einsum("hl,lhd->hd", weights, seen[:, 1])
            token += 1
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 32), (16, 8, 64), (8, 1, 32)])
def test_sinks_and_slopes(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    torch.manual_seed(5)
    layout = Layout(16, [1, 40, 2, 1], [1, 40, 130, 2100])
    cache, query = layout.cache(kv_heads, head_dim, dtype), torch.randn(44, heads, head_dim).to(dtype)
    for sinks, slopes in ((torch.randn(heads) * 3, None), (None, torch.rand(heads)), (torch.ones(heads) * 60, None)):
        got = paged_attention(query, cache, layout, scale=head_dim**-0.5, sinks=sinks, alibi_slopes=slopes)
        expected = attended_densely(query, cache, layout, sinks, slopes)
        assert (got.double() - expected).abs().max() <= TOLERANCE[dtype]


def quantized(values: torch.Tensor, name: str, kv_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """values [..., 2, Hkv, block_size, D] -> (as stored, as they are read back in float64)."""
    if name.startswith("fp8"):
        dtype, limit = {"fp8_e4m3": (torch.float8_e4m3fn, 448.0), "fp8_e5m2": (torch.float8_e5m2, 57344.0)}[name]
        scale = kv_scale[:, :, None, None]
        stored = (values / scale).clamp(-limit, limit).to(dtype)
        return stored, stored.double() * scale
    limit = {"int8": 127.0, "int4": 7.0}[name]
    most = values.abs().amax(-1, keepdim=True)
    scale = most / limit
    codes = (values * (limit / most)).round()
    if name == "int8":
        rows = codes.to(torch.int8)
    else:
        low, high = (codes + 8).to(torch.uint8).chunk(2, dim=-1)
        rows = low | high << 4
    return with_scales(rows, scale), codes.double() * scale


def with_scales(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """rows [..., block_size, C] of bytes, scale [..., block_size, 1] -> cache: codes of a block, then scales."""
    scales = scale.contiguous().view(rows.dtype)
    return torch.cat([rows.flatten(-2), scales.flatten(-2)], dim=-1).unflatten(-1, (rows.shape[-2], -1))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "int8", "int4"])
@pytest.mark.parametrize("head_dim", [32, 64, 20])
def test_caches_of_fewer_bits(dtype: torch.dtype, name: str, head_dim: int) -> None:
    torch.manual_seed(6)
    layout = Layout(16, [1, 40, 2, 1], [1, 40, 130, 1100])
    values = torch.randn(layout.num_blocks, 2, 2, 16, head_dim) * torch.rand(layout.num_blocks, 1, 1, 16, 1)
    kv_scale = torch.tensor([[0.01, 0.5], [2.0, 0.03]])
    stored, read_back = quantized(values, name, kv_scale)
    query = torch.randn(44, 6, head_dim).to(dtype)
    got = paged_attention(query, stored, layout, scale=head_dim**-0.5, kv_scale=kv_scale)
    expected = attended_densely(query, read_back, layout, None, None)
    assert (got.double() - expected).abs().max() <= TOLERANCE[dtype]


def attended_in_int8(query: torch.Tensor, stored: torch.Tensor, layout: Layout) -> torch.Tensor:
    """As `int8_products` says, in float64 but for what is rounded, in runs of 64 tokens: D ** -0.5 is the scale."""
    steps = query.float().abs().amax(-1, keepdim=True) / 127
    query = ((query.float() / steps).round() * steps).double()
    codes, scales = rows_of(stored)
    codes, scales = codes.double(), scales.contiguous().view(torch.float32).double()
    out, token = torch.empty(query.shape, dtype=torch.float64), 0
    for row, (query_len, kv_len) in enumerate(zip(layout.query_lens, layout.kv_lens, strict=True)):
        places = torch.arange(kv_len)
        blocks, within = layout.block_table[row].long()[places // stored.shape[3]], places % stored.shape[3]
        of_row, scale = (
            part[blocks, :, :, within].repeat_interleave(query.shape[1] // stored.shape[2], 2)
            for part in (codes, scales)
        )
        for position in range(kv_len - query_len, kv_len):
            keys, values, value_scales = (
                of_row[: position + 1, 0] * scale[: position + 1, 0],
                of_row[:, 1],
                scale[:, 1, :, 0],
            )
            scores = torch.einsum("hd,lhd->lh", query[token], keys) * query.shape[2] ** -0.5
            weights = (scores - scores.amax(0)).exp()
            total, out[token] = weights.sum(0), 0.0
            for begin in range(0, position + 1, 64):
                some = slice(begin, min(begin + 64, position + 1))
                scaled = weights[some] * value_scales[some]
                step = scaled.amax(0) / 255
                rounded = torch.where(step > 0, (scaled / step).round() * step, 0.0)
                out[token] += torch.einsum("lh,lhd->hd", rounded, values[some])
            out[token] /= total[:, None]
            token += 1
    return out


HAS_BYTE_PRODUCTS = (build_name() or "").removesuffix("-emulated") in ("avx512vnni", "avx512bf16")
"""Of attention: with AMX its products are those of bfloat16."""


@pytest.mark.parametrize(("head_dim", "heads"), [(32, 6), (64, 16), (96, 6), (128, 4)])
def test_int8_products_round_queries_and_weights(head_dim: int, heads: int) -> None:
    """Within 1 % of what is not rounded, and within bfloat16's rounding of what is rounded exactly so."""
    torch.manual_seed(12)
    layout = Layout(16, [1, 40, 3, 20], [1, 40, 130, 1100])
    values = torch.randn(layout.num_blocks, 2, 2, 16, head_dim) * torch.rand(layout.num_blocks, 1, 1, 16, 1)
    stored, read_back = quantized(values, "int8", torch.ones(2, 2))
    query = (torch.randn(64, heads, head_dim) * 2).bfloat16()
    got = paged_attention(query, stored, layout, scale=head_dim**-0.5, int8_products=True)
    exact = attended_densely(query, read_back, layout, None, None)

    def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
        return float((found.double() - wanted).norm() / exact.norm())

    assert error(got, exact) <= 0.01
    if not HAS_BYTE_PRODUCTS:
        assert torch.equal(got, paged_attention(query, stored, layout, scale=head_dim**-0.5))
        return
    rounded = attended_in_int8(query, stored, layout)
    assert error(got, rounded) <= 0.0025
    assert error(rounded, exact) > 0.005


def test_what_is_no_number_stays_with_those_who_see_it() -> None:
    """In an int8 cache that is multiplied in int8: infinite values and keys of the last token of 20."""
    for which in range(2):
        layout = Layout(16, [20], [20])
        values = torch.randn(layout.num_blocks, 2, 2, 16, 64)
        stored, _ = quantized(values, "int8", torch.ones(2, 2))
        query = torch.randn(20, 4, 64).bfloat16()
        expected = paged_attention(query, stored, layout, scale=0.125, int8_products=True)
        block, place = int(layout.block_table[0, 1]), 3
        for part, value in zip(rows_of(stored), (0.0, math.inf), strict=True):
            row = part[block, which, :, place]
            row.copy_(torch.full((row.shape[-1] // 4,), value).view(torch.int8))
        got = paged_attention(query, stored, layout, scale=0.125, int8_products=True)
        assert got[-1].isnan().all()
        if HAS_BYTE_PRODUCTS:
            assert torch.equal(got[:-1], expected[:-1])


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("head_dim", [20, 64])
def test_every_number_is_written_as_torch_rounds_it(name: str, head_dim: int) -> None:
    dtype = getattr(torch, name)
    limit = torch.finfo(dtype).max
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = torch.cat([numbers.float(), torch.linspace(-1, 1, 9999) * limit, torch.rand(9999) * 4 * limit / 2**16])
    rows = torch.cat([numbers, torch.zeros(-len(numbers) % (2 * head_dim))]).view(-1, 2, head_dim)
    cache = torch.zeros(-(-len(rows) // 16), 2, 2, 16, head_dim, dtype=dtype)
    write_kv_cache(rows, rows, cache, torch.arange(len(rows)), torch.ones(2, 2))
    expected = rows.clamp(-limit, limit).to(dtype).float()
    for which in range(2):
        written = cache[:, which].transpose(1, 2).reshape(-1, 2, head_dim)[: len(rows)].float()
        torch.testing.assert_close(written, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(written.signbit(), expected.signbit())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "int8", "uint8"])
@pytest.mark.parametrize("head_dim", [20, 64, 96])
@pytest.mark.parametrize("tokens", [1, 64])
def test_every_code_is_read_as_torch_reads_it(dtype: torch.dtype, name: str, head_dim: int, tokens: int) -> None:
    """Alone, and in pieces that are whole. uint8 holds two codes of int4."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(getattr(torch, name))
    expected = codes.float()[:, None].expand(-1, head_dim)
    if name == "int8":
        codes, expected = codes[codes != -128], expected[codes != -128]  # which is never written
    if name == "uint8":
        expected = torch.cat(
            [(half.float() - 8)[:, None].expand(-1, head_dim // 2) for half in (codes & 15, codes >> 4)], 1
        )
    layout = Layout(tokens, [1] * len(codes), [tokens] * len(codes))
    width = head_dim // 2 if name == "uint8" else head_dim
    cache = torch.zeros(layout.num_blocks, 2, 1, tokens, width, dtype=codes.dtype)
    blocks = layout.block_table[:, 0].long()
    cache.view(torch.uint8)[blocks, 1] = codes.view(torch.uint8)[:, None, None, None].expand(-1, 1, tokens, width)
    if name in ("int8", "uint8"):
        cache = with_scales(cache, torch.ones(*cache.shape[:-1], 1))
    query = torch.zeros(len(codes), 1, head_dim, dtype=dtype)
    got = paged_attention(query, cache, layout, scale=1.0, kv_scale=torch.ones(2, 1))
    torch.testing.assert_close(got, expected[:, None].to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 1500])
def test_segments_change_no_bit(dtype: torch.dtype, window: int | None) -> None:
    """Long sequences are cut for the threads if there are few of them; alone and beside others, with any heads."""
    torch.manual_seed(7)
    lengths = [5000, 1025, 1024, 3, 2048, 700, *[40] * 20]
    together = Layout(16, [1] * len(lengths), lengths)
    cache, query = together.cache(8, 32, dtype), torch.randn(len(lengths), 16, 32).to(dtype)
    whole = paged_attention(query, cache, together, scale=0.2, sliding_window=window)
    expected = ops.paged_attention(
        query.double(), cache.double(), together, scale=0.2, sliding_window=window, soft_cap=None
    )
    assert (whole.double() - expected).abs().max() <= TOLERANCE[dtype]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            for row, length in enumerate(lengths[:6]):
                alone = Layout(16, [1], [length], together.block_table[row : row + 1].contiguous())
                got = paged_attention(query[row : row + 1], cache, alone, scale=0.2, sliding_window=window)
                assert torch.equal(got[0], whole[row])
                chunk = torch.cat([torch.randn(min(length, 9) - 1, 16, 32).to(dtype), query[row : row + 1]])
                alone = Layout(16, [len(chunk)], [length], together.block_table[row : row + 1].contiguous())
                got = paged_attention(chunk, cache, alone, scale=0.2, sliding_window=window)
                assert torch.equal(got[-1], whole[row])
    finally:
        torch.set_num_threads(before)


def test_large_scores_do_not_overflow() -> None:
    layout = Layout(16, [1, 1], [200, 5])
    cache = layout.cache(2, 32, torch.float32) * 100
    query = torch.randn(2, 4, 32) * 100
    expected = ops.paged_attention(
        query.double(), cache.double(), layout, scale=1.0, sliding_window=None, soft_cap=None
    )
    got = paged_attention(query, cache, layout, scale=1.0)
    assert (got - expected).abs().max() <= 1e-3  # values are about 300


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("window", "soft_cap", "name", "head_dim"),
    [
        (None, None, "network", 64),
        (50, None, "network", 64),
        (None, 3.0, "network", 64),
        (None, None, "fp8_e4m3", 96),
        (None, None, "fp8_e5m2", 64),
        (50, None, "int8", 160),
        (None, None, "int8", 32),
        (None, None, "int8 products", 64),
        (50, 3.0, "int8 products", 96),
        (None, None, "int4", 64),
        (50, 3.0, "int4", 128),
    ],
)
def test_a_query_depends_on_what_it_sees_alone(
    dtype: torch.dtype, window: int | None, soft_cap: float | None, name: str, head_dim: int
) -> None:
    """To the bit: whatever chunk it comes in, whoever is beside it, wherever its blocks are."""
    torch.manual_seed(3)
    lengths = [70, 5, 300, 64, 129, 1, 128, 9]
    whole = Layout(16, lengths, lengths)
    query = torch.randn(sum(lengths), 6, head_dim).to(dtype)
    cache, kv_scale = whole.cache(2, head_dim, dtype), None
    if name != "network":
        kv_scale = torch.tensor([[0.01, 0.5], [2.0, 0.03]])
        cache, _ = quantized(torch.randn(cache.shape), name.split()[0], kv_scale)

    def attend(layout: Layout, rows: torch.Tensor) -> torch.Tensor:
        return paged_attention(
            rows,
            cache,
            layout,
            scale=0.125,
            sliding_window=window,
            soft_cap=soft_cap,
            kv_scale=kv_scale,
            int8_products=name == "int8 products",
        )

    together = attend(whole, query)
    for row, length in enumerate(lengths):
        begin = int(whole.query_start_loc[row])
        done = 0
        while done < length:
            chunk = random.Random(done + row).choice([1, 1, 2, 7, 40, 130])
            chunk = min(chunk, length - done)
            table = whole.block_table[row : row + 1].contiguous()
            alone = Layout(16, [chunk], [done + chunk], table)
            rows = query[begin + done : begin + done + chunk]
            assert torch.equal(attend(alone, rows), together[begin + done : begin + done + chunk])
            done += chunk


def test_the_same_sequence_in_other_blocks_of_another_size_gives_the_same() -> None:
    torch.manual_seed(4)
    keys_values = torch.randn(200, 2, 2, 64).bfloat16()
    query = torch.randn(3, 4, 64).bfloat16()
    results = []
    for block_size in (1, 16, 33, 256):
        layout = Layout(block_size, [3], [200])
        cache = torch.full((layout.num_blocks, 2, 2, block_size, 64), float("nan"), dtype=torch.bfloat16)
        positions = torch.arange(200)
        cache[layout.block_table[0].long()[positions // block_size], :, :, positions % block_size] = keys_values
        results.append(paged_attention(query, cache, layout, scale=0.125))
    assert all(torch.equal(result, results[0]) for result in results)


def test_what_the_kernel_does_not_serve_goes_to_torch() -> None:
    layout = Layout(8, [1, 4], [20, 30])
    cache, query = layout.cache(2, 32, torch.float16), torch.randn(5, 4, 32)
    got = paged_attention(query, cache, layout, scale=0.2, soft_cap=5.0)
    expected = ops.paged_attention(query.double(), cache.double(), layout, scale=0.2, sliding_window=None, soft_cap=5.0)
    assert (got.double() - expected).abs().max() <= 4e-3


def test_too_wide_heads_are_refused_by_the_table() -> None:
    backend = next(backend for backend in backends() if backend.op is ops.paged_attention)
    for name, limit in (("head_dim", MAX_HEAD_DIM), ("queries_per_kv_head", MAX_QUERIES_PER_KV_HEAD)):
        assert backend.refusal(OpRequest(sizes={name: limit})) == unavailable()
        assert "at most" in (backend.refusal(OpRequest(sizes={name: limit + 2})) or "") or unavailable()


class TestConformance(AttentionBackendSuite):
    def make_backend(self) -> AttentionBackend:
        return AttentionBackend("cpu", op_table())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_with_room_between_them_give_the_same_bits(dtype: torch.dtype) -> None:
    """As where a hybrid network's states are larger than a block of keys and values: nothing is left to torch."""
    layout = Layout(4, [7, 1, 1], [7, 30, 70])
    shape = (layout.num_blocks, 2, 2, 4, 32)
    close = torch.randn(shape).to(dtype)
    wide = torch.full((layout.num_blocks, math.prod(shape[1:]) + 24), torch.nan, dtype=dtype)
    apart = wide[:, : math.prod(shape[1:])].view(shape)
    assert not apart.is_contiguous()
    apart.copy_(close)
    tokens = sum(layout.query_lens)
    key, value, query = (torch.randn(tokens, heads, 32).to(dtype) for heads in (2, 2, 4))
    for cache in (close, apart):
        write_kv_cache(key, value, cache, layout.slot_mapping)
    assert torch.equal(close, apart)
    assert wide[:, math.prod(shape[1:]) :].isnan().all()
    expected = paged_attention(query, close, layout, scale=0.2)
    assert torch.equal(paged_attention(query, apart, layout, scale=0.2), expected)
    alone = Layout(4, [1], [70], layout.block_table[2:].clone())
    assert torch.equal(paged_attention(query[-1:], apart, alone, scale=0.2), expected[-1:])
