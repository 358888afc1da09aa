"""Latent attention in Triton against the reference: random steps; everything that must not be read is NaN."""

from __future__ import annotations

import random

import pytest
import torch
from kernels_cuda_attention_cases import on_device
from kernels_cuda_support import check, here, poison
from ops_layouts import Layout, grow_trees, random_layout

from quire_interfaces import latent_row_bytes
from quire_kernels_cuda.platform import LaunchConfig
from quire_kernels_cuda.triton import index, latent
from quire_ops import ops
from quire_ops import ops as ref

WIDTH, RANK = 24, 20
SMALL = LaunchConfig(blocks={"BLOCK_M": 16, "BLOCK_N": 16}, num_warps=4, num_stages=2)
"""Pieces so small that a few dozen tokens take several."""
MIXED = [(1, 17), (12, 25), (1, 40), (3, 33), (9, 9)]
FEW = [(1, 17), (2, 25)]


def in_fp8(cache: torch.Tensor, rank: int = RANK) -> torch.Tensor:
    """The rows of a cache as bytes of the layout in fp8, the beginnings of longer ones; NaN where there is NaN."""
    width = cache.shape[2]
    rows = torch.full((*cache.shape[:2], latent_row_bytes("fp8_ds_mla", width, rank) + 4), 0xFF, dtype=torch.uint8)
    rows = rows[..., :-4]
    slots = torch.nonzero(~cache.isnan().any(dim=-1).flatten())[:, 0]
    ref.write_latent_cache(cache.reshape(-1, width)[slots], rows, slots, rank)
    return rows


def step(lens: list[tuple[int, int]], roots: dict[int, int], dtype: torch.dtype) -> tuple[Layout, torch.Tensor]:
    """A layout, and a cache whose rows are the beginnings of longer ones, NaN where no token is."""
    torch.manual_seed(1)
    layout, num_blocks = random_layout(random.Random(0), lens, 8, shuffle=True)
    if roots:
        grow_trees(layout, roots, random.Random(2))
    cache = torch.full((num_blocks, 8, WIDTH + 8), float("nan"), dtype=dtype)[..., :WIDTH]
    for table, kv_len in zip(layout.block_table.tolist(), layout.kv_lens, strict=True):
        for position in range(kv_len):
            cache[table[position // 8], position % 8] = torch.randn(WIDTH).to(dtype)
    return layout, cache


@pytest.mark.parametrize(
    ("lens", "roots", "dtype", "heads", "fp8"),
    [
        ([(1, 5), (1, 40), (1, 1)], {}, torch.float32, 18, False),
        (MIXED, {}, torch.bfloat16, 3, False),
        (MIXED, {}, torch.bfloat16, 3, True),
        ([(6, 45), (1, 30), (9, 40)], {0: 37, 2: 25}, torch.float32, 3, False),
    ],
    ids=["decodes", "mixed", "mixed, fp8", "trees"],
)
def test_equals_reference(monkeypatch, lens, roots, dtype, heads, fp8) -> None:
    layout, cache = step(lens, roots, dtype)
    cache = in_fp8(cache) if fp8 else cache
    query = torch.randn(sum(layout.query_lens), heads, WIDTH).to(dtype)
    wanted = ref.latent_attention(query, cache, layout, scale=0.3, rank=RANK)
    poison(monkeypatch)
    monkeypatch.setattr(latent, "latent_config", lambda *_: SMALL)
    options = {"scale": 0.3, "rank": RANK}
    check(latent.latent_attention(here(query), here(cache), on_device(layout), **options), wanted, dtype)


def test_keys_are_divided(monkeypatch) -> None:
    """More splits than there are keys to share, too."""
    monkeypatch.setattr(latent, "num_splits", lambda *_: 4)
    test_equals_reference(monkeypatch, [(1, 60), (1, 1), (2, 33)], {}, torch.float32, 3, False)


@pytest.mark.parametrize(("splits", "fp8"), [(1, False), (4, False), (4, True)])
def test_chosen_slots(monkeypatch, splits: int, fp8: bool) -> None:
    layout, cache = step(FEW, {}, torch.bfloat16)
    monkeypatch.setattr(latent, "num_splits", lambda *_: splits)
    tokens = sum(layout.query_lens)
    ends = [kv_len - count + i + 1 for count, kv_len in FEW for i in range(count)]
    found = torch.stack([torch.cat([torch.randperm(end)[:20], torch.full((20,), -1)])[:20] for end in ends])
    found[:, 1:] = found[:, 1:][:, torch.randperm(19)]
    slots = ops.position_slots(found, layout)
    unread = torch.ones(cache.shape[:2], dtype=torch.bool).flatten()
    unread[slots[slots >= 0]] = False
    cache[unread.view(cache.shape[:2])] = float("nan")
    cache = in_fp8(cache) if fp8 else cache
    query = torch.randn(tokens, 18, WIDTH).to(torch.bfloat16)
    wanted = ops.sparse_latent_attention(query, cache, slots, scale=0.3, rank=RANK)
    poison(monkeypatch)
    monkeypatch.setattr(latent, "latent_config", lambda *_: SMALL)
    options = {"scale": 0.3, "rank": RANK}
    check(latent.sparse_latent_attention(here(query), here(cache), here(slots), **options), wanted, torch.bfloat16)


def test_rows_are_written() -> None:
    layout, cache = step([(7, 25), (1, 40)], {}, torch.bfloat16)
    cache.fill_(float("nan"))
    wanted, rows, there = cache.clone(), torch.randn(8, WIDTH).to(torch.bfloat16), here(cache)
    ref.write_latent_cache(rows, wanted, layout.slot_mapping)
    latent.write_latent_cache(here(rows), there, here(layout.slot_mapping))
    assert torch.equal(there.cpu().nan_to_num(7.0), wanted.nan_to_num(7.0))


def test_several_scales_of_a_latent(monkeypatch) -> None:
    """Of a latent whose last group is not whole; float32 shows every scale that is taken for another."""
    layout, _ = step(FEW, {}, torch.float32)
    cache = torch.randn(int(layout.block_table.max()) + 1, 8, 150) * 10.0 ** torch.randint(-2, 3, (150,))
    rows, query = in_fp8(cache, 140), torch.randn(3, 2, 150) / 1000
    options = {"scale": 0.3, "rank": 140}
    wanted = ref.latent_attention(query, rows, layout, **options)
    poison(monkeypatch)
    monkeypatch.setattr(latent, "latent_config", lambda *_: SMALL)
    check(latent.latent_attention(here(query), here(rows), on_device(layout), **options), wanted, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_written_in_fp8(dtype: torch.dtype) -> None:
    """The reference's bytes, of zeros, of halves between two codes and of what is no number, too."""
    torch.manual_seed(4)
    entries = torch.randn(6, 150) * torch.tensor([1.0, 1e-3, 300.0, 1.0, 1e-20, 1.0])[:, None]
    entries[3, :140], entries[5, 1] = 0.0, torch.nan
    entries[0, :5] = torch.tensor([448.0, 17.0, -19.0, 2.0**-10, 3 * 2.0**-10])
    entries[0, 5:140] = 0.0
    cache = torch.full((3, 4, latent_row_bytes("fp8_ds_mla", 150, 140) + 4), 7, dtype=torch.uint8)
    wanted, there, slots = cache.clone(), here(cache), torch.tensor([11, 0, 5, 4, 3, 8])
    ref.write_latent_cache(entries.to(dtype), wanted[..., :-4], slots, 140)
    latent.write_latent_cache(here(entries.to(dtype)), there[..., :-4], here(slots), 140)
    got, wanted = there.cpu().view(12, -1), wanted.view(12, -1)
    numbers = torch.arange(12) != 8
    assert torch.equal(got[numbers], wanted[numbers])
    assert got[8, 140:144].view(torch.float32).isnan().all()
    assert torch.equal(got[8, 144:], wanted[8, 144:])


@pytest.mark.parametrize("workspace", [50, 1 << 24], ids=["token by token", "at once"])
def test_the_index_finds_what_the_reference_finds(monkeypatch, workspace: int) -> None:
    """In keys that are parts of longer rows; and where the found tokens are."""
    layout, cache = step([(1, 40), (3, 25), (1, 1)], {}, torch.float32)
    keys, tokens = cache[..., 4:], sum(layout.query_lens)
    query, weights = torch.randn(tokens, 18, WIDTH - 4), torch.randn(tokens, 18)
    monkeypatch.setattr(index, "WORKSPACE", workspace)
    monkeypatch.setattr(index, "_MOST_HEADS", 16)
    monkeypatch.setattr(index, "_SCORES", 16)
    there = on_device(layout)
    poison(monkeypatch)
    for k in (7, 64):
        wanted = ops.index_topk(query, weights, keys, layout, k=k)
        got = index.index_topk(here(query), here(weights), here(keys), there, k=k)
        assert torch.equal(got.cpu().sort(dim=1).values, wanted.sort(dim=1).values)
        assert (got[:, 0] >= 0).all()
        slots = index.position_slots(got, there)
        assert torch.equal(slots.cpu(), ops.position_slots(got.cpu(), layout))
