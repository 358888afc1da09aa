"""Attention over windows and compressed entries against the references: entries, what tokens find, and attention."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from ops_layouts import Layout, random_layout

from quire_ops import Op, OpBackend, OpRequest, op_table, ops
from quire_ops.compressed_attention import entry_slots, entry_span, window_ends

LENS = [(1, 17), (7, 25), (1, 40), (20, 20), (3, 4), (1, 2), (2, 3)]
SIZE, HEADS, RATE = 10, 5, 4
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2}


def serving(op: Op[..., Any]) -> list[OpBackend]:
    backends = [backend for backend in op_table().backends(op) if backend.name != "reference"]
    return [backend for backend in backends if backend.refusal(OpRequest()) is None]


def rows_of_tokens(width: int, block_size: int, dtype: torch.dtype = torch.float32) -> tuple[Layout, torch.Tensor]:
    """A layout, and a cache of rows with NaN wherever no token stands."""
    torch.manual_seed(1)
    layout, num_blocks = random_layout(random.Random(3), LENS, block_size, shuffle=True)
    cache = torch.full((num_blocks, block_size, width), float("nan"), dtype=dtype)
    for table, kv_len in zip(layout.block_table.tolist(), layout.kv_lens, strict=True):
        for position in range(kv_len):
            cache[table[position // block_size], position % block_size] = torch.randn(width).to(dtype)
    return layout, cache


def entries_of(layout: Layout, rate: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A cache of entries, with NaN wherever none has been written."""
    span = entry_span(rate, layout.block_size)
    blocks = int(layout.block_table.max()) + 1
    cache = torch.full((blocks, layout.block_size, -(-SIZE // span)), float("nan"), dtype=dtype)
    for sequence, kv_len in enumerate(layout.kv_lens):
        windows = torch.arange(kv_len // rate)
        slots = entry_slots(layout, torch.full_like(windows, sequence), windows, rate)
        cache.flatten(0, 1)[slots] = torch.randn(*slots.shape, cache.shape[2]).to(dtype)
    return cache


def within(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    error = (got.float() - wanted.float()).abs().max()
    assert error <= TOLERANCE[got.dtype] * wanted.float().abs().max()


@pytest.mark.parametrize(("rate", "block_size"), [(4, 8), (8, 4), (20, 8), (3, 1), (128, 16)])
def test_an_entry_lies_in_one_block_within_its_window(rate: int, block_size: int) -> None:
    layout, _ = random_layout(random.Random(5), [(300, 300), (2, 270)], block_size, shuffle=True)
    sequences, windows = window_ends(layout, rate)
    ended = [(0, each) for each in range(300 // rate)] + [(1, each) for each in range(268 // rate, 270 // rate)]
    assert list(zip(sequences.tolist(), windows.tolist(), strict=True)) == ended
    slots = entry_slots(layout, sequences, windows, rate)
    assert (slots // block_size == slots[:, :1] // block_size).all()
    for sequence, window, own in zip(sequences.tolist(), windows.tolist(), slots.tolist(), strict=True):
        table = layout.block_table[sequence].tolist()
        of_window = [table[place // block_size] * block_size + place % block_size
                     for place in range(window * rate, (window + 1) * rate)]  # fmt: skip
        assert own == of_window[-len(own) :]


@pytest.mark.parametrize("backend", serving(ops.compress_windows), ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("rate", [1, RATE, 50])
def test_windows_become_entries(backend: OpBackend, dtype: torch.dtype, overlap: bool, rate: int) -> None:
    width = SIZE * (2 if overlap else 1)
    layout, cache = rows_of_tokens(1 + 2 * width, 8, dtype)
    values, gates, bias = cache[..., 1 : 1 + width], cache[..., 1 + width :], torch.randn(rate, width)
    got = backend.function(values, gates, bias, layout, overlap=overlap)
    wanted = ops.compress_windows(values, gates, bias, layout, overlap=overlap)
    assert len(wanted) == len(window_ends(layout, rate).windows) == (0 if rate == 50 else len(got))
    if len(wanted):
        within(got, wanted)


def test_an_entry_is_the_mean_of_its_window() -> None:
    layout, cache = rows_of_tokens(2 * SIZE, 8)
    gates = torch.zeros_like(cache[..., :SIZE])
    got = ops.compress_windows(cache[..., :SIZE], gates, torch.zeros(RATE, SIZE), layout, overlap=False)
    table = layout.block_table[2].tolist()
    last = torch.stack([cache[table[place // 8], place % 8, :SIZE] for place in range(36, 40)])
    torch.testing.assert_close(got[window_ends(layout, RATE).sequences == 2][0], last.mean(dim=0))


@pytest.mark.parametrize("backend", serving(ops.compressed_topk), ids=lambda backend: backend.name)
@pytest.mark.parametrize("workspace", [1, 1 << 22], ids=["token by token", "at once"])
@pytest.mark.parametrize("k", [1, 3, 64])
def test_tokens_find_what_the_reference_finds(
    backend: OpBackend, workspace: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire_ops.compressed_attention.ATTENTION_WORKSPACE", workspace)
    layout, _ = rows_of_tokens(1, 8)
    entries, tokens = entries_of(layout, RATE), sum(layout.query_lens)
    query, weights = torch.randn(tokens, 6, SIZE), torch.randn(tokens, 6)
    got = backend.function(query, weights, entries, layout, k=k, rate=RATE)
    wanted = ops.compressed_topk(query, weights, entries, layout, k=k, rate=RATE)
    assert got.shape == (tokens, min(k, 10))
    assert torch.equal(got.sort(dim=1).values, wanted.sort(dim=1).values)


@pytest.mark.parametrize("backend", serving(ops.compressed_attention), ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("workspace", [1, 1 << 22], ids=["token by token", "at once"])
@pytest.mark.parametrize("kind", ["window", "all", "chosen"])
def test_tokens_attend_to_their_window_and_to_entries(
    backend: OpBackend, dtype: torch.dtype, workspace: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire_ops.compressed_attention.ATTENTION_WORKSPACE", workspace)
    layout, cache = rows_of_tokens(SIZE + 3, 8, dtype)
    tokens, entries = sum(layout.query_lens), entries_of(layout, RATE, dtype)
    query, chosen = torch.randn(tokens, HEADS, SIZE).to(dtype), None
    if kind == "chosen":
        weights = torch.randn(tokens, 6)
        chosen = ops.compressed_topk(torch.randn(tokens, 6, SIZE).to(dtype), weights, entries, layout, k=3, rate=RATE)
    found = (None, None, None) if kind == "window" else (entries, layout, chosen)
    inputs = query, cache[..., :SIZE], layout, torch.randn(HEADS), *found
    size = {"scale": 0.3, "sliding_window": 6, "rate": RATE}
    within(backend.function(*inputs, **size), ops.compressed_attention(*inputs, **size))


def test_a_sink_takes_attention_and_a_short_window_forgets() -> None:
    layout, cache = rows_of_tokens(SIZE, 8)
    query = torch.randn(sum(layout.query_lens), HEADS, SIZE)
    size = {"scale": 0.3, "sliding_window": 1, "rate": 1}
    own = cache.flatten(0, 1)[layout.slot_mapping]
    alone = ops.compressed_attention(query, cache, layout, torch.full((HEADS,), -1e9), None, None, None, **size)
    torch.testing.assert_close(alone, own[:, None].expand_as(alone))
    taken = ops.compressed_attention(query, cache, layout, torch.full((HEADS,), 1e9), None, None, None, **size)
    torch.testing.assert_close(taken, torch.zeros_like(taken))
