"""Sparse attention against the reference: what an index finds, where it is, and attention over it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from ops_layouts import Layout, encoded_cache, random_layout

from quire_ops import Op, OpBackend, OpRequest, op_table, ops
from quire_ops import ops as ref

MIXES = {
    "decodes": [(1, 5), (1, 40), (1, 1), (1, 33)],
    "chunks and decodes": [(1, 17), (7, 25), (1, 40), (20, 20), (3, 4), (1, 2)],
}
KEY, WIDTH, RANK, HEADS = 8, 24, 16, 5
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2}


def serving(op: Op[..., Any]) -> list[OpBackend]:
    backends = [backend for backend in op_table().backends(op) if backend.name != "reference"]
    return [backend for backend in backends if backend.refusal(OpRequest()) is None]


def step(mix: str, block_size: int, dtype: torch.dtype = torch.float32) -> tuple[Layout, torch.Tensor]:
    """A layout, and a cache of rows with NaN wherever no token stands; an index key is the end of a row."""
    torch.manual_seed(1)
    layout, num_blocks = random_layout(random.Random(mix), MIXES[mix], block_size, shuffle=True)
    cache = torch.full((num_blocks, block_size, WIDTH + KEY), float("nan"), dtype=dtype)
    for table, kv_len in zip(layout.block_table.tolist(), layout.kv_lens, strict=True):
        for position in range(kv_len):
            cache[table[position // block_size], position % block_size] = torch.randn(WIDTH + KEY).to(dtype)
    return layout, cache


@pytest.mark.parametrize("backend", serving(ops.index_topk), ids=lambda backend: backend.name)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("workspace", [1, 1 << 22], ids=["token by token", "at once"])
def test_the_index_finds_what_the_reference_finds(
    backend: OpBackend, mix: str, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire_ops.sparse_attention.WORKSPACE", workspace)
    layout, cache = step(mix, 8)
    query, weights = torch.randn(sum(layout.query_lens), 6, KEY), torch.randn(sum(layout.query_lens), 6)
    for k in (1, 7, 64):
        got = backend.function(query, weights, cache[..., WIDTH:], layout, k=k)
        wanted = ops.index_topk(query, weights, cache[..., WIDTH:], layout, k=k)
        assert got.shape == (len(query), min(k, max(layout.kv_lens)))
        assert torch.equal(got.sort(dim=1).values, wanted.sort(dim=1).values)
        assert (got[:, 0] >= 0).all()


@pytest.mark.parametrize("backend", serving(ops.index_topk_blocks), ids=lambda backend: backend.name)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("workspace", [1, 1 << 22], ids=["token by token", "at once"])
def test_the_index_finds_blocks(backend: OpBackend, mix: str, workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_ops.block_sparse.WORKSPACE", workspace)
    layout, cache = step(mix, 8)
    query = torch.randn(sum(layout.query_lens), 6, KEY)
    ends = [
        end for count, end in zip(layout.query_lens, layout.kv_lens, strict=True) for end in range(end - count, end)
    ]
    for table, kv_len in zip(layout.block_table.tolist(), layout.kv_lens, strict=True):
        for position in range(kv_len):
            if position % 3 != 2:  # not the last token of its block
                cache[table[position // 8], position % 8] = float("nan")
    for k in (1, 4, 64):
        size = {"block_tokens": 3, "k": k}
        got = backend.function(query, cache[..., WIDTH:], layout, **size)
        wanted = ops.index_topk_blocks(query, cache[..., WIDTH:], layout, **size)
        assert got.shape == wanted.shape == (len(query), 3 * min(k, max(layout.kv_lens) // 3) + 2)
        assert torch.equal(got.sort(dim=1).values, wanted.sort(dim=1).values)
        for positions, own in zip(got.tolist(), ends, strict=True):
            seen = {position for position in positions if position >= 0}
            assert seen <= set(range(own + 1))
            assert len(seen) == min(k, (own + 1) // 3) * 3 + (own + 1) % 3
            assert {*range((own + 1) // 3 * 3, own + 1)} <= seen


@pytest.mark.parametrize("workspace", [1, 1 << 22], ids=["token by token", "at once"])
@pytest.mark.parametrize("mix", MIXES)
def test_pools_are_found_and_what_is_behind_the_last(mix: str, workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_ops.sparse_attention.WORKSPACE", workspace)
    layout, cache = step(mix, 8)
    query, weights = torch.randn(sum(layout.query_lens), 6, KEY), torch.randn(sum(layout.query_lens), 6)
    positions = [place for count, end in zip(layout.query_lens, layout.kv_lens, strict=True)
                 for place in range(end - count, end)]  # fmt: skip
    states, bias = cache[..., : 2 * KEY], torch.randn(3, KEY)
    for k in (1, 4, 64):
        wanted = ops.pooled_index_topk(query, weights, states, bias, layout, k=k)
        assert wanted.shape == (len(query), min(3 * k + 2, max(layout.kv_lens)))
        for found, place in zip(wanted.tolist(), positions, strict=True):
            whole, seen = (place + 1) // 3, [each for each in found if each >= 0]
            assert len(seen) == 3 * min(k, whole) + (place + 1) % 3
            assert set(range(3 * whole, place + 1)) <= set(seen)
        for backend in serving(ops.pooled_index_topk):
            assert torch.equal(backend.function(query, weights, states, bias, layout, k=k), wanted)


def test_pools_of_one_token_are_tokens() -> None:
    layout, cache = step("chunks and decodes", 8)
    query, weights = torch.randn(sum(layout.query_lens), 6, KEY), torch.randn(sum(layout.query_lens), 6)
    found = ops.pooled_index_topk(query, weights, cache[..., : 2 * KEY], torch.zeros(1, KEY), layout, k=7)
    wanted = ops.index_topk(query, weights, cache[..., :KEY], layout, k=7)
    assert torch.equal(found, wanted.sort(dim=1, descending=True).values)


@pytest.mark.parametrize("backend", serving(ops.position_slots), ids=lambda backend: backend.name)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("block_size", [1, 8])
def test_positions_become_slots(backend: OpBackend, mix: str, block_size: int) -> None:
    layout, _ = step(mix, block_size)
    ends = [end for count, end in zip(layout.query_lens, layout.kv_lens, strict=True) for _ in range(count)]
    positions = torch.stack([torch.randint(-1, end, (6,)) for end in ends])
    got = backend.function(positions, layout)
    assert torch.equal(got, ops.position_slots(positions, layout))
    own = torch.tensor([layout.kv_lens[0] - 1])
    first = Layout(layout.block_table[:1], torch.tensor([0, 1]), own, block_size, [1], layout.kv_lens[:1])
    if layout.query_lens[0] == 1:
        assert backend.function(own[:, None], first)[0, 0] == layout.slot_mapping[0]


@pytest.mark.parametrize("backend", serving(ops.sparse_latent_attention), ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("workspace", [1, 1 << 22], ids=["token by token", "at once"])
def test_attention_reads_these_slots_alone(
    backend: OpBackend, dtype: torch.dtype, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire_ops.sparse_attention.WORKSPACE", workspace)
    layout, cache = step("chunks and decodes", 8, dtype)
    tokens = sum(layout.query_lens)
    query, weights = torch.randn(tokens, HEADS, WIDTH).to(dtype), torch.randn(tokens, 6)
    found = ops.index_topk(torch.randn(tokens, 6, KEY), weights, cache[..., WIDTH:], layout, k=9)
    slots = ops.position_slots(found, layout)
    unread = torch.ones(cache.shape[:2], dtype=torch.bool).flatten()
    unread[slots[slots >= 0]] = False
    cache.flatten(0, 1)[unread] = float("nan")
    size = {"scale": 0.25, "rank": RANK}
    got = backend.function(query, cache[..., :WIDTH], slots, **size)
    wanted = ops.sparse_latent_attention(query, cache[..., :WIDTH], slots, **size)
    assert got.dtype == dtype
    assert got.shape == (tokens, HEADS, RANK)
    assert (got.float() - wanted.float()).abs().max() <= TOLERANCE[dtype] * wanted.float().abs().max()


@pytest.mark.parametrize("workspace", [1, 1 << 22], ids=["token by token", "at once"])
def test_the_log_sum_exp_comes_with_it(workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_ops.sparse_attention.WORKSPACE", workspace)
    layout, cache = step("chunks and decodes", 8)
    tokens, size = sum(layout.query_lens), {"scale": 0.25, "rank": RANK}
    query = torch.randn(tokens, HEADS, WIDTH)
    found = ops.index_topk(torch.randn(tokens, 6, KEY), torch.randn(tokens, 6), cache[..., WIDTH:], layout, k=9)
    slots = ops.position_slots(found, layout)
    wanted = ops.sparse_latent_attention_with_lse(query, cache[..., :WIDTH], slots, **size)
    assert torch.equal(wanted[0], ops.sparse_latent_attention(query, cache[..., :WIDTH], slots, **size))
    first = cache[..., :WIDTH].flatten(0, 1)[slots[:, 0]]  # of the first token of each sequence, all there is
    alone = (slots >= 0).sum(1) == 1
    scores = torch.einsum("thw,tw->th", query, first) * 0.25
    torch.testing.assert_close(wanted[1][alone], scores[alone])
    for backend in serving(ops.sparse_latent_attention_with_lse):
        for got, each in zip(backend.function(query, cache[..., :WIDTH], slots, **size), wanted, strict=True):
            torch.testing.assert_close(got, each)


def test_with_every_token_found_it_is_latent_attention() -> None:
    layout, cache = step("chunks and decodes", 8)
    tokens, size = sum(layout.query_lens), {"scale": 0.25, "rank": RANK}
    query, latents = torch.randn(tokens, HEADS, WIDTH), cache[..., :WIDTH].clone()
    found = ops.index_topk(torch.randn(tokens, 6, KEY), torch.randn(tokens, 6), cache[..., WIDTH:], layout, k=99)
    slots = ops.position_slots(found, layout)
    got = ops.sparse_latent_attention(query, latents, slots, **size)
    torch.testing.assert_close(got, ref.latent_attention(query, latents, layout, **size))


@pytest.mark.parametrize("backend", serving(ops.sparse_attention), ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("workspace", [1, 1 << 22], ids=["token by token", "at once"])
def test_keys_and_values_of_these_slots_alone(
    backend: OpBackend, dtype: torch.dtype, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire_ops.block_sparse.WORKSPACE", workspace)
    torch.manual_seed(2)
    layout, num_blocks = random_layout(random.Random(3), MIXES["chunks and decodes"], 8, shuffle=True)
    tokens, computed = sum(layout.query_lens), dtype if dtype in TOLERANCE else torch.float32
    kv_scale = torch.tensor([[0.5, 2.0], [1.5, 0.25]]) if dtype == torch.float8_e4m3fn else None
    cache = encoded_cache(torch.randn(num_blocks, 2, 2, 8, KEY), dtype, None)
    query = torch.randn(tokens, 4, KEY).to(computed)
    found = ops.index_topk_blocks(query, torch.randn(num_blocks, 8, KEY), layout, block_tokens=3, k=2)
    slots = ops.position_slots(found, layout)
    wanted = ops.sparse_attention(query, cache, slots, scale=0.3, kv_scale=kv_scale)
    if computed == dtype:  # other slots are not read
        unread = torch.ones(num_blocks, 8, dtype=torch.bool)
        unread.view(-1)[slots[slots >= 0]] = False
        cache.movedim(3, 1)[unread] = float("nan")
    got = backend.function(query, cache, slots, scale=0.3, kv_scale=kv_scale)
    assert got.dtype == computed
    assert (got.float() - wanted.float()).abs().max() <= TOLERANCE[computed] * wanted.float().abs().max()


def test_with_every_slot_it_is_paged_attention() -> None:
    torch.manual_seed(2)
    layout, num_blocks = random_layout(random.Random(3), MIXES["chunks and decodes"], 8, shuffle=True)
    query, cache = torch.randn(sum(layout.query_lens), 4, KEY), torch.randn(num_blocks, 2, 2, 8, KEY)
    found = ops.index_topk_blocks(query, torch.randn(num_blocks, 8, KEY), layout, block_tokens=3, k=99)
    got = ops.sparse_attention(query, cache, ops.position_slots(found, layout), scale=0.3)
    torch.testing.assert_close(got, ref.paged_attention(query, cache, layout, scale=0.3))
