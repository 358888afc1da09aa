"""Latent attention and products of heads: against references in float64, and bits that follow nothing but the row."""

from __future__ import annotations

import random

import pytest
import torch
from kernels_cpu_steps import Layout

from quire_interfaces import latent_row_bytes
from quire_kernels_cpu.latent import (
    head_linear,
    index_topk,
    latent_attention,
    sparse_latent_attention,
    write_latent_cache,
)
from quire_ops import ops

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SHAPES = [
    # heads, width, rank
    (1, 5, 3),
    (2, 40, 40),
    (3, 37, 21),
    (5, 96, 64),
    (16, 576, 512),
    (20, 64, 64),
    (33, 24, 16),
    (48, 96, 32),
    (128, 160, 128),
    (130, 20, 16),
]


def latents(layout: Layout, width: int, dtype: torch.dtype, beyond: int = 0) -> torch.Tensor:
    """[num_blocks, block_size, W]: random where a token is, else NaN, as in the `beyond` numbers behind each row."""
    cache = torch.full((layout.num_blocks, layout.block_size, width + beyond), float("nan")).to(dtype)
    for row, length in enumerate(layout.kv_lens):
        positions = torch.arange(length)
        blocks = layout.block_table[row].long()[positions // layout.block_size]
        cache[blocks, positions % layout.block_size, :width] = torch.randn(length, width).to(dtype)
    return cache[..., :width]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("block_size", [1, 2, 7, 16, 64])
@pytest.mark.parametrize(("heads", "width", "rank"), SHAPES)
def test_mixed_steps_equal_the_reference(
    dtype: torch.dtype, block_size: int, heads: int, width: int, rank: int
) -> None:
    chooser = random.Random(f"{block_size}{heads}{width}")
    torch.manual_seed(chooser.randrange(1000))
    query_lens = [chooser.choice([1, 1, 1, 2, 9]) for _ in range(6)]
    kv_lens = [count + chooser.choice([0, 1, 15, 63, 64, 65, 200]) for count in query_lens]
    layout = Layout(block_size, query_lens, kv_lens)
    cache = latents(layout, width, dtype, beyond=chooser.choice([0, 1, 9]))
    query = torch.randn(sum(query_lens), heads, width).to(dtype)
    got = latent_attention(query, cache, layout, scale=width**-0.5, rank=rank)
    expected = ops.latent_attention(query.double(), cache.double(), layout, scale=width**-0.5, rank=rank)
    assert got.dtype == dtype
    assert got.shape == expected.shape
    assert (got.double() - expected).abs().max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "width", "rank"), [(1, 40, 40), (4, 96, 64), (16, 64, 32), (32, 37, 21), (130, 32, 32)]
)
def test_a_token_has_the_same_bits_however_it_is_computed(
    dtype: torch.dtype, heads: int, width: int, rank: int
) -> None:
    """Alone, in chunks, beside others, with any blocks, threads and heads."""
    torch.manual_seed(3)
    lengths = [2100, 1025, 1024, 64, 700, *[40] * 9]
    together = Layout(16, [1] * len(lengths), lengths)
    cache = latents(together, width, dtype)
    query, size = torch.randn(len(lengths), heads, width).to(dtype), {"scale": 0.2, "rank": rank}
    whole = latent_attention(query, cache, together, **size)
    expected = ops.latent_attention(query.double(), cache.double(), together, **size)
    assert (whole.double() - expected).abs().max() <= TOLERANCE[dtype]
    before = torch.get_num_threads()
    try:
        for threads, beside, block_sizes in ((1, 2, ()), (2, 20, (1, 2, 5)), (5, 3, (7,))):
            torch.set_num_threads(threads)
            assert torch.equal(latent_attention(query, cache, together, **size), whole)
            for row, length in enumerate(lengths[:5]):
                alone = Layout(16, [1], [length], together.block_table[row : row + 1].contiguous())
                mine = query[row : row + 1]
                assert torch.equal(latent_attention(mine, cache, alone, **size)[0], whole[row])
                some = latent_attention(mine[:, : heads // 2 + 1].contiguous(), cache, alone, **size)
                assert torch.equal(some[0], whole[row, : heads // 2 + 1])
                chunk = torch.cat([torch.randn(beside, heads, width).to(dtype), mine])
                alone = Layout(16, [len(chunk)], [length], together.block_table[row : row + 1].contiguous())
                assert torch.equal(latent_attention(chunk, cache, alone, **size)[-1], whole[row])
                for block_size in block_sizes:
                    other = Layout(block_size, [1], [length])
                    copied = torch.full((other.num_blocks, block_size, width + 2), float("nan")).to(dtype)
                    positions = torch.arange(length)
                    rows = cache[together.block_table[row].long()[positions // 16], positions % 16]
                    blocks = other.block_table[0].long()[positions // block_size]
                    copied[blocks, positions % block_size, :width] = rows
                    assert torch.equal(latent_attention(mine, copied[..., :width], other, **size)[0], whole[row])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_that_only_seem_to_lie_together(dtype: torch.dtype) -> None:
    """Blocks of one token in another order, of which the first and the last of 16 are where they would be in a row."""
    torch.manual_seed(4)
    order = torch.cat([torch.tensor([0]), torch.randperm(14) + 1, torch.tensor([15])])
    table = (torch.arange(64).view(4, 16)[:, order].flatten() + 1).to(torch.int32)[None]
    scrambled, sorted_out = Layout(1, [1], [64], table), Layout(1, [1], [64], torch.arange(65, dtype=torch.int32)[None])
    cache = torch.randn(65, 1, 64).to(dtype)
    rows = torch.cat([cache[table[0].long()], cache[:1]])
    query, size = torch.randn(1, 3, 64).to(dtype), {"scale": 0.3, "rank": 32}
    got = latent_attention(query, cache, scrambled, **size)
    assert torch.equal(got, latent_attention(query, rows, sorted_out, **size))


def test_a_score_that_is_no_number_stays_its_own_heads() -> None:
    layout = Layout(16, [1, 1], [200, 30])
    cache, query = latents(layout, 64, torch.float32), torch.randn(2, 20, 64)
    whole = latent_attention(query, cache, layout, scale=0.1, rank=32)
    query[0, 7, 3] = torch.nan
    got = latent_attention(query, cache, layout, scale=0.1, rank=32)
    assert got[0, 7].isnan().all()
    others = [head for head in range(20) if head != 7]
    assert torch.equal(got[0, others], whole[0, others])
    assert torch.equal(got[1], whole[1])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "inputs", "outputs"), [(1, 70, 33), (3, 12, 20), (5, 64, 96), (16, 512, 128), (40, 31, 1), (128, 32, 40)]
)
def test_products_of_heads(dtype: torch.dtype, heads: int, inputs: int, outputs: int) -> None:
    torch.manual_seed(5)
    both = torch.randn(heads, outputs + 6, inputs).to(dtype)  # of which a part is the weight
    wider = torch.randn(40, heads, inputs + 3).to(dtype)
    x, weight = wider[..., :inputs], both[:, 6:]
    whole = head_linear(x, weight)
    expected = ops.head_linear(x.double(), weight.double())
    assert (whole.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    assert torch.equal(head_linear(x.contiguous(), weight.contiguous()), whole)
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(head_linear(x.transpose(1, 2).contiguous().transpose(1, 2), turned), whole)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            for first, last in ((0, 1), (3, 5), (5, 13), (13, 30), (0, 40)):
                assert torch.equal(head_linear(x[first:last], weight), whole[first:last])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_products_of_many_tokens(dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    x, weight = torch.randn(1100, 2, 32).to(dtype), torch.randn(2, 33, 32).to(dtype)
    whole = head_linear(x, weight)
    assert torch.equal(torch.cat([head_linear(part, weight) for part in x.split(97)]), whole)
    assert head_linear(x[:0], weight).shape == (0, 2, 33)


def slots_of(layout: Layout, positions: torch.Tensor) -> torch.Tensor:
    return ops.position_slots(positions, layout)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize(
    ("heads", "width", "rank"), [(1, 5, 3), (3, 40, 40), (16, 96, 64), (20, 64, 32), (130, 20, 16)]
)
def test_sparse_attention_equals_the_reference(
    dtype: torch.dtype, block_size: int, heads: int, width: int, rank: int
) -> None:
    torch.manual_seed(heads)
    layout = Layout(block_size, [1, 7, 1, 2], [30, 7, 400, 90])
    cache, query = latents(layout, width, dtype, beyond=3), torch.randn(11, heads, width).to(dtype)
    last = torch.cat([torch.arange(a - b, a) for a, b in zip(layout.kv_lens, layout.query_lens, strict=True)])
    positions = torch.full((11, 130), -1)
    for token, position in enumerate(last.tolist()):
        seen = torch.randperm(position + 1)[: random.Random(token).randint(1, 130)]
        places = torch.cat([torch.zeros(1, dtype=torch.long), torch.randperm(129) + 1])[: len(seen)]  # -1 between them
        positions[token, places] = seen
    slots = slots_of(layout, positions)
    got = sparse_latent_attention(query, cache, slots, scale=width**-0.5, rank=rank)
    expected = ops.sparse_latent_attention(query.double(), cache.double(), slots, scale=width**-0.5, rank=rank)
    assert got.dtype == dtype
    assert (got.double() - expected).abs().max() <= TOLERANCE[dtype]
    before = torch.get_num_threads()
    try:
        for threads in (1, 5):
            torch.set_num_threads(threads)
            for token in range(11):
                mine = query[token : token + 1], cache, slots[token : token + 1]
                assert torch.equal(sparse_latent_attention(*mine, scale=width**-0.5, rank=rank)[0], got[token])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "width", "rank"), [(3, 37, 21), (16, 96, 64), (48, 64, 32)])
def test_over_all_tokens_it_is_latent_attention(dtype: torch.dtype, heads: int, width: int, rank: int) -> None:
    torch.manual_seed(8)
    layout = Layout(16, [1, 1, 9], [40, 1500, 70])
    cache, query = latents(layout, width, dtype), torch.randn(11, heads, width).to(dtype)
    query_positions = [39, 1499, *range(61, 70)]
    positions = torch.arange(1500).repeat(11, 1)
    positions[positions > torch.tensor(query_positions)[:, None]] = -1
    got = sparse_latent_attention(query, cache, slots_of(layout, positions), scale=0.2, rank=rank)
    assert torch.equal(got, latent_attention(query, cache, layout, scale=0.2, rank=rank))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize(("heads", "width"), [(1, 3), (4, 20), (7, 128), (64, 32)])
def test_the_index_finds_the_same_whatever_else_is_asked(
    dtype: torch.dtype, block_size: int, heads: int, width: int
) -> None:
    torch.manual_seed(9)
    layout = Layout(block_size, [1, 9, 1, 30], [700, 300, 5, 30])
    cache = latents(layout, width + 5, dtype)[..., 5:]
    query, weights = torch.randn(41, heads, width).to(dtype), torch.randn(41, heads)
    for k in (1, 20, 299):
        got = index_topk(query, weights, cache, layout, k=k)
        assert torch.equal(got, index_topk(query, weights, cache, layout, k=k))
        wanted = ops.index_topk(query.double(), weights.double(), cache.double(), layout, k=k)
        filled = torch.where(got < 0, 10**6, got)
        assert torch.equal(filled, filled.sort(dim=1).values)
        different = (torch.where(wanted < 0, 10**6, wanted).sort(dim=1).values != filled).any(dim=1)
        assert int(different.sum()) <= 2  # sums in float32 may put two that are nearly equal in another order
        before, token = torch.get_num_threads(), 0
        try:
            for row, count in enumerate(layout.query_lens):
                torch.set_num_threads(1 + row)
                for _ in range(count):
                    length = layout.kv_lens[row] - count + 1 + token - int(layout.query_start_loc[row])
                    alone = Layout(block_size, [1], [length], layout.block_table[row : row + 1].contiguous())
                    mine = index_topk(query[token : token + 1], weights[token : token + 1], cache, alone, k=k)[0]
                    assert torch.equal(mine, got[token, : len(mine)])
                    assert (got[token, len(mine) :] == -1).all()
                    token += 1
        finally:
            torch.set_num_threads(before)


def test_an_index_of_equal_scores_finds_the_first_and_of_none_the_others() -> None:
    layout = Layout(4, [1], [20])
    cache, query, weights = latents(layout, 8, torch.float32), torch.randn(1, 2, 8), torch.zeros(1, 2)
    assert index_topk(query, weights, cache, layout, k=7).tolist() == [list(range(7))]
    block, offset = layout.block_table[0, 1], 2  # position 6
    cache[block, offset] = torch.nan
    assert index_topk(query, weights, cache, layout, k=7).tolist() == [[0, 1, 2, 3, 4, 5, 7]]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "width", "rank"), [(1, 24, 16), (3, 150, 132), (16, 576, 512), (40, 144, 128), (130, 20, 20)]
)
def test_rows_in_fp8(dtype: torch.dtype, heads: int, width: int, rank: int) -> None:
    """They are the reference's bytes, other bytes stay, and what is attended to has the same bits alone, beside others,
    and in chosen slots."""
    torch.manual_seed(heads)
    layout = Layout(7, [1, 9, 1, 2], [1, 75, 1100, 64])
    size = latent_row_bytes("fp8_ds_mla", width, rank)
    cache = torch.full((layout.num_blocks, 7, size + 12), 0x7F, dtype=torch.uint8)  # no numbers, and scales of 3e38
    rows, wanted = cache[..., :size], cache.clone()[..., :size]
    for row, length in enumerate(layout.kv_lens):
        positions = torch.arange(length)
        slots = layout.block_table[row].long()[positions // 7] * 7 + positions % 7
        entries = (torch.randn(length, width) * torch.exp(torch.randn(length, 1))).to(dtype)
        write_latent_cache(entries, rows, slots, rank)
        ops.write_latent_cache(entries, wanted, slots, rank)
    assert torch.equal(rows, wanted)
    assert (cache[..., size:] == 0x7F).all()
    query, options = torch.randn(13, heads, width).to(dtype), {"scale": width**-0.5, "rank": rank}
    got = latent_attention(query, rows, layout, **options)
    expected = ops.latent_attention(query.double(), rows, layout, **options)
    assert (got.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max().clamp_min(1)
    ends = [
        end - count + i + 1 for count, end in zip(layout.query_lens, layout.kv_lens, strict=True) for i in range(count)
    ]
    positions = torch.arange(max(ends)).expand(13, -1)
    everything = ops.position_slots(torch.where(positions < torch.tensor(ends)[:, None], positions, -1), layout)
    assert torch.equal(sparse_latent_attention(query, rows, everything, **options), got)
    for row, first in ((0, 0), (2, 10)):
        alone = Layout(7, [1], [layout.kv_lens[row]], layout.block_table[row : row + 1].contiguous())
        assert torch.equal(latent_attention(query[first : first + 1], rows, alone, **options)[0], got[first])
