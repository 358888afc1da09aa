"""Latent attention and its cache writes against the reference: random layouts, everything not to be read is NaN."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from ops_layouts import Layout, random_layout

from quire_ops import Op, OpBackend, OpRequest, op_table, ops
from quire_ops import ops as ref

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
MIXES = {
    "decodes": [(1, 5), (1, 40), (1, 1), (1, 33), (1, 40)],
    "whole prefills": [(9, 9), (1, 1), (30, 30)],
    "chunks and decodes": [(1, 17), (7, 25), (1, 40), (20, 20), (3, 4), (1, 2)],
}
WIDTH, RANK = 24, 16


def serving(op: Op[..., Any]) -> list[OpBackend]:
    backends = [backend for backend in op_table().backends(op) if backend.name != "reference"]
    return [backend for backend in backends if backend.refusal(OpRequest()) is None]


def poisoned(layout: Layout, num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
    cache = torch.full((num_blocks, layout.block_size, WIDTH), float("nan"), dtype=dtype)
    for table, kv_len in zip(layout.block_table.tolist(), layout.kv_lens, strict=True):
        for position in range(kv_len):
            block, offset = divmod(position, layout.block_size)
            cache[table[block], offset] = torch.randn(WIDTH).to(dtype)
    return cache


@pytest.mark.parametrize("backend", serving(ops.latent_attention), ids=lambda backend: backend.name)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("block_size", [1, 8])
def test_equals_reference(backend: OpBackend, mix: str, dtype: torch.dtype, block_size: int) -> None:
    torch.manual_seed(1)
    layout, num_blocks = random_layout(random.Random(mix), MIXES[mix], block_size, shuffle=True)
    cache = poisoned(layout, num_blocks, dtype)
    query = torch.randn(sum(layout.query_lens), 6, WIDTH).to(dtype)
    wanted = ref.latent_attention(query, cache, layout, scale=0.25, rank=RANK)
    for _ in range(2):  # the second layer of a step finds what the first one worked out
        got = backend.function(query, cache, layout, scale=0.25, rank=RANK)
        assert got.dtype == dtype
        assert got.shape == (len(query), 6, RANK)
        assert torch.isfinite(got).all()
        assert (got.float() - wanted.float()).abs().max() <= TOLERANCE[dtype] * wanted.float().abs().max()


def test_reference_is_attention_over_expanded_keys_and_values() -> None:
    """Absorbing the projections changes nothing: checked against torch's attention over each head's own keys."""
    torch.manual_seed(2)
    layout, num_blocks = random_layout(random.Random(0), [(30, 30)], 8, shuffle=True)
    cache = poisoned(layout, num_blocks, torch.float64)
    rows = cache[layout.block_table[0].long()].flatten(0, 1)[:30]
    to_key, to_value = torch.randn(6, 12, RANK).double(), torch.randn(6, 10, RANK).double()
    nope, rope = torch.randn(30, 6, 12).double(), torch.randn(30, 6, WIDTH - RANK).double()
    keys = torch.einsum("lr,hdr->hld", rows[:, :RANK], to_key)
    keys = torch.cat((keys, rows[:, RANK:].expand(6, -1, -1)), dim=-1)
    values = torch.einsum("lr,hdr->hld", rows[:, :RANK], to_value)
    queries = torch.cat((nope, rope), dim=-1).transpose(0, 1)
    wanted = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=0.3)
    absorbed = torch.cat((torch.einsum("thd,hdr->thr", nope, to_key), rope), dim=-1)
    got = ref.latent_attention(absorbed, cache, layout, scale=0.3, rank=RANK)
    assert torch.allclose(torch.einsum("thr,hdr->htd", got, to_value), wanted)


@pytest.mark.parametrize("backend", serving(ops.write_latent_cache), ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_writes_are_the_references(backend: OpBackend, dtype: torch.dtype) -> None:
    layout, num_blocks = random_layout(random.Random(3), [(7, 25), (1, 40)], 8, shuffle=True)
    cache = torch.full((num_blocks, 8, WIDTH), float("nan"), dtype=dtype)
    wanted, rows = cache.clone(), torch.randn(8, WIDTH).to(dtype)
    ref.write_latent_cache(rows, wanted, layout.slot_mapping)
    backend.function(rows, cache, layout.slot_mapping)
    assert torch.equal(cache.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert cache.isfinite().all(dim=-1).sum() == 8
