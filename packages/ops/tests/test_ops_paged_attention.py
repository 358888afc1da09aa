"""Paged attention and cache writes against the reference: random layouts, everything that must not be read is NaN."""

from __future__ import annotations

import random

import pytest
import torch
from ops_layouts import poisoned_cache, random_layout

from quire_ops import OpBackend, OpRequest, attention_plan, op_table, ops, torch_attention
from quire_ops import ops as ref

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}

BACKENDS = [b for b in op_table().backends(ops.paged_attention) if b.name != "reference"]
BACKENDS = [b for b in BACKENDS if b.refusal(OpRequest()) is None]
WRITERS = [b for b in op_table().backends(ops.write_kv_cache) if b.refusal(OpRequest()) is None]

MIXES = {
    "one decode": [(1, 1)],
    "decodes": [(1, 5), (1, 40), (1, 1), (1, 33), (1, 40)],
    "whole prefills": [(9, 9), (1, 1), (30, 30)],
    "chunks and decodes": [(1, 17), (7, 25), (1, 40), (20, 20), (3, 4), (1, 2)],
}


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("window", "soft_cap", "sinks", "alibi", "heads", "block_size"),
    [
        (None, None, False, False, (4, 2), 16),
        (6, None, False, False, (4, 4), 1),
        (1, None, False, False, (2, 1), 8),
        (None, 3.0, False, False, (6, 2), 8),
        (8, 5.0, False, False, (4, 1), 16),
        (None, None, True, False, (6, 2), 8),
        (7, None, True, False, (4, 1), 16),
        (1, 2.0, True, False, (4, 2), 1),
        (None, None, False, True, (6, 2), 8),
        (9, 4.0, True, True, (4, 4), 4),
    ],
)
def test_equals_reference(
    backend: OpBackend,
    mix: str,
    dtype: torch.dtype,
    window: int | None,
    soft_cap: float | None,
    sinks: bool,
    alibi: bool,
    heads: tuple[int, int],
    block_size: int,
) -> None:
    rng = random.Random(f"{mix}{window}{soft_cap}")
    torch.manual_seed(1)
    layout, num_blocks = random_layout(rng, MIXES[mix], block_size, shuffle=True)
    cache = poisoned_cache(layout, num_blocks, heads[1], 16, dtype)
    query = torch.randn(sum(layout.query_lens), heads[0], 16).to(dtype)
    scores_of_nothing = torch.linspace(-3.0, 3.0, heads[0]).to(dtype) if sinks else None
    options = {"scale": 0.25, "sliding_window": window, "soft_cap": soft_cap, "sinks": scores_of_nothing}
    options["alibi_slopes"] = torch.logspace(-1, -3, heads[0]) if alibi else None
    wanted = ref.paged_attention(query, cache, layout, **options)
    for _ in range(2):  # the second layer of a step finds what the first one worked out
        got = backend.function(query, cache, layout, **options)
        assert got.dtype == dtype
        assert torch.isfinite(got).all()
        assert (got.float() - wanted.float()).abs().max() <= TOLERANCE[dtype] * wanted.float().abs().max()


@pytest.mark.parametrize("limits", [(0, 0), (1 << 40, 1 << 40), (1 << 12, 1 << 11)], ids=str)
@pytest.mark.parametrize("window", [None, 9])
def test_grouping_changes_nothing(limits: tuple[int, int], window: int | None, monkeypatch) -> None:
    # No sharing; everything in one call; something between.
    for name, value in zip(("GROUP_BYTES", "CALL_BYTES"), limits, strict=True):
        monkeypatch.setattr(attention_plan, name, value)
    rng = random.Random(2)
    for shuffle in (False, True):
        lens = [(1, rng.randint(1, 60)) for _ in range(9)] + [(4, 30), (12, 12)]
        rng.shuffle(lens)
        layout, num_blocks = random_layout(rng, lens, 4, shuffle=shuffle)
        cache = poisoned_cache(layout, num_blocks, 2, 8, torch.float32)
        query = torch.randn(sum(layout.query_lens), 4, 8)
        got = torch_attention.paged_attention(query, cache, layout, scale=0.3, sliding_window=window)
        wanted = ref.paged_attention(query, cache, layout, scale=0.3, sliding_window=window)
        assert (got - wanted).abs().max() <= 5e-6 * wanted.abs().max()


def test_long_chunks_are_cut_into_pieces(monkeypatch) -> None:
    monkeypatch.setattr(torch_attention, "QUERY_PIECE", 5)
    rng = random.Random(3)
    layout, num_blocks = random_layout(rng, [(17, 40), (12, 30), (23, 23)], 8, shuffle=True)
    cache = poisoned_cache(layout, num_blocks, 2, 8, torch.float32)
    query = torch.randn(52, 4, 8)
    for window, soft_cap, sinks in ((None, None, None), (7, None, None), (None, 2.0, None), (9, None, torch.randn(4))):
        options = {"scale": 0.3, "sliding_window": window, "soft_cap": soft_cap, "sinks": sinks}
        layout.derived.clear()
        got = torch_attention.paged_attention(query, cache, layout, **options)
        wanted = ref.paged_attention(query, cache, layout, **options)
        assert (got - wanted).abs().max() <= 5e-6 * wanted.abs().max()


def test_a_sink_takes_its_share_of_attention() -> None:
    layout, num_blocks = random_layout(random.Random(4), [(1, 1)], 4, shuffle=True)
    cache = poisoned_cache(layout, num_blocks, 1, 8, torch.float32)
    query = torch.zeros(1, 1, 8)  # every score is 0: a sink of log(3) weighs three times what the only token does
    plain = ref.paged_attention(query, cache, layout, scale=1.0)
    sunk = ref.paged_attention(query, cache, layout, scale=1.0, sinks=torch.tensor([3.0]).log())
    assert torch.allclose(sunk, plain / 4)


def test_sequence_does_not_feel_neighbours_with_nan() -> None:
    rng = random.Random(4)
    layout, num_blocks = random_layout(rng, [(1, 9), (1, 11), (3, 8)], 4, shuffle=True)
    cache = poisoned_cache(layout, num_blocks, 1, 8, torch.float32)
    cache[layout.block_table[1].long()] = float("nan")
    query = torch.randn(5, 2, 8)
    got = torch_attention.paged_attention(query, cache, layout, scale=1.0)
    assert torch.isfinite(got[[0, 2, 3, 4]]).all()
    assert torch.isnan(got[1]).all()


@pytest.mark.parametrize("cache_dtype", TOLERANCE, ids=str)
def test_cache_of_another_dtype(cache_dtype: torch.dtype) -> None:
    layout, num_blocks = random_layout(random.Random(5), [(1, 9), (4, 11)], 4, shuffle=True)
    cache = poisoned_cache(layout, num_blocks, 2, 8, cache_dtype)
    query = torch.randn(5, 4, 8)
    got = torch_attention.paged_attention(query, cache, layout, scale=0.5)
    wanted = ref.paged_attention(query, cache, layout, scale=0.5)
    assert (got - wanted).abs().max() <= 5e-6 * wanted.abs().max()


@pytest.mark.parametrize("cache_dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("backend", WRITERS, ids=lambda backend: backend.name)
def test_write_touches_its_slots_only(backend, cache_dtype: torch.dtype) -> None:
    layout, num_blocks = random_layout(random.Random(6), [(3, 9), (1, 2), (5, 5)], 4, shuffle=True)
    cache = torch.full((num_blocks, 2, 3, 4, 8), 7.0, dtype=cache_dtype)
    key, value = torch.randn(9, 3, 8), torch.randn(9, 3, 8)
    backend.function(key, value, cache, layout.slot_mapping)
    slots = cache.permute(0, 3, 1, 2, 4).reshape(num_blocks * 4, 2, 3, 8)
    assert torch.equal(slots[layout.slot_mapping, 0], key.to(cache_dtype))
    assert torch.equal(slots[layout.slot_mapping, 1], value.to(cache_dtype))
    others = torch.ones(num_blocks * 4, dtype=torch.bool)
    others[layout.slot_mapping] = False
    assert (slots[others] == 7.0).all()


def test_slopes_prefer_what_is_near() -> None:
    layout, num_blocks = random_layout(random.Random(4), [(1, 3)], 4, shuffle=True)
    cache = poisoned_cache(layout, num_blocks, 1, 8, torch.float32)
    query = torch.zeros(1, 1, 8)  # every score is 0: with a slope of log(2) a token weighs half of the one behind it
    values = torch.stack([cache[layout.block_table[0, 0], 1, 0, offset] for offset in range(3)])
    slopes = torch.tensor([2.0]).log()
    got = ref.paged_attention(query, cache, layout, scale=1.0, alibi_slopes=slopes)
    assert torch.allclose(got[0, 0], (values[0] + 2 * values[1] + 4 * values[2]) / 7)
