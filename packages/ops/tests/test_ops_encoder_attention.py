"""Attention of encoders, and of decoders with a bias for each distance, against their references."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from ops_layouts import poisoned_cache, random_layout

from quire_ops import Op, OpBackend, OpRequest, op_table, ops
from quire_ops import ops as ref

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def serving(op: Op[..., Any]) -> list[OpBackend]:
    backends = [backend for backend in op_table().backends(op) if backend.name != "reference"]
    return [backend for backend in backends if backend.refusal(OpRequest()) is None]


@pytest.mark.parametrize("backend", serving(ops.encoder_attention), ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("lens", [[7], [1, 12, 5, 1], [19, 3], [6, 6, 6, 2, 2, 0, 6]], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 3},
        {"window": 3, "look_ahead": 1},
        {"window": 20, "look_ahead": 0},
        {"look_ahead": 2},
        {"bias": 4},
        {"bias": 40, "window": 2},
        {"bias": 3, "window": 1, "look_ahead": 4},
    ],
    ids=str,
)
def test_encoder_attention(backend: OpBackend, dtype: torch.dtype, lens: list[int], options: dict[str, Any]) -> None:
    torch.manual_seed(sum(lens))
    options = {name: torch.randn(6, 2 * value + 1) if name == "bias" else value for name, value in options.items()}
    query, key, value = (torch.randn(sum(lens), heads, 8).to(dtype) for heads in (6, 2, 2))
    wanted = ref.encoder_attention(query.double(), key.double(), value.double(), lens, scale=0.3, **options)
    got = backend.function(query, key, value, lens, scale=0.3, **options)
    assert (got.dtype, got.shape) == (dtype, query.shape)
    assert (got.double() - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max()


@pytest.mark.parametrize("backend", serving(ops.encoder_attention), ids=lambda backend: backend.name)
@pytest.mark.parametrize("options", [{}, {"window": 6}, {"bias": 4}], ids=str)
def test_tokens_behind_those_that_are_attended_to(backend: OpBackend, options: dict[str, Any]) -> None:
    """They attend to the others, and nothing of their keys and values is read."""
    torch.manual_seed(2)
    options = {name: torch.randn(6, 2 * value + 1) if name == "bias" else value for name, value in options.items()}
    lens, key_lens = [7, 7, 7, 3], [7, 4, 4, 1]
    query, key, value = (torch.randn(sum(lens), heads, 8) for heads in (6, 2, 2))
    whole = ref.encoder_attention(query, key, value, lens, scale=0.3, **options)
    wanted = ref.encoder_attention(query, key, value, lens, scale=0.3, key_lens=key_lens, **options)
    begin = 0
    for length, key_len in zip(lens, key_lens, strict=True):
        key[begin + key_len : begin + length] = value[begin + key_len : begin + length] = float("nan")
        begin += length
    got = backend.function(query, key, value, lens, scale=0.3, key_lens=key_lens, **options)
    assert (got - wanted).abs().max() <= TOLERANCE[torch.float32] * wanted.abs().max()
    assert torch.equal(wanted[:7], whole[:7])
    assert (wanted[7:] - whole[7:]).abs().max() > 0.01


@pytest.mark.parametrize("backend", serving(ops.encoder_attention), ids=lambda backend: backend.name)
@pytest.mark.parametrize(("window", "look_ahead"), [(None, None), (700, None), (30, None), (9, 2)])
def test_long_sequences_are_cut_where_there_is_a_mask(
    backend: OpBackend, window: int | None, look_ahead: int | None
) -> None:
    """The reference would take long; torch's own attention with one whole mask is as good."""
    torch.manual_seed(0)
    length, bias = 1100, torch.randn(2, 257)
    query, key, value = torch.randn(3, length, 2, 4)
    distance = torch.arange(length) - torch.arange(length)[:, None]
    mask = bias[:, distance.clamp(-128, 128) + 128]
    if window is not None:
        mask = mask.masked_fill(distance < -window, float("-inf"))
        mask = mask.masked_fill(distance > (window if look_ahead is None else look_ahead), float("-inf"))
    heads = (part.transpose(0, 1) for part in (query, key, value))
    wanted = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, scale=0.5).transpose(0, 1)
    got = backend.function(query, key, value, [length], scale=0.5, window=window, bias=bias, look_ahead=look_ahead)
    assert torch.allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("backend", serving(ops.biased_paged_attention), ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("furthest", [3, 64])
def test_biased_paged_attention(backend: OpBackend, dtype: torch.dtype, furthest: int) -> None:
    torch.manual_seed(furthest)
    mix = [(1, 17), (7, 25), (1, 40), (20, 20), (3, 4), (1, 1)]
    layout, num_blocks = random_layout(random.Random(1), mix, 8, shuffle=True)
    cache = poisoned_cache(layout, num_blocks, 2, 8, dtype)
    query, bias = torch.randn(sum(layout.query_lens), 4, 8).to(dtype), torch.randn(4, furthest + 1)
    wanted = ref.biased_paged_attention(query.double(), cache.double(), layout, scale=0.3, bias=bias)
    for _ in range(2):  # the second layer of a step finds what the first one worked out
        got = backend.function(query, cache, layout, scale=0.3, bias=bias)
        assert got.dtype == dtype
        assert (got.double() - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max()


@pytest.mark.parametrize("backend", serving(ops.tempered_paged_attention), ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_tempered_paged_attention(backend: OpBackend, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    layout, num_blocks = random_layout(random.Random(1), [(1, 17), (7, 25), (20, 20), (1, 1)], 8, shuffle=True)
    cache = poisoned_cache(layout, num_blocks, 2, 8, dtype)
    query = torch.randn(sum(layout.query_lens), 4, 8).to(dtype)
    options = {"scale": 0.9, "soft_cap": 2.0, "factors": 1 + torch.rand(len(query))}
    wanted = ref.tempered_paged_attention(query.double(), cache.double(), layout, **options)
    got = backend.function(query, cache, layout, **options)
    assert got.dtype == dtype
    assert (got.double() - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max()


@pytest.mark.parametrize("backend", serving(ops.relative_paged_attention), ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("extent", "window"), [(3, None), (64, None), (9, 9), (9, 12)])
def test_relative_paged_attention(backend: OpBackend, dtype: torch.dtype, extent: int, window: int | None) -> None:
    torch.manual_seed(extent)
    mix = [(1, 17), (7, 25), (1, 40), (20, 20), (3, 4), (1, 1)]
    layout, num_blocks = random_layout(random.Random(1), mix, 8, shuffle=True)
    cache = poisoned_cache(layout, num_blocks, 2, 8, dtype)
    query, relative = (torch.randn(sum(layout.query_lens), 4, size).to(dtype) for size in (8, 5))
    biases = {"relative": relative, "profiles": torch.randn(5, extent).to(dtype)}
    biases |= {"sinks": torch.randn(query.shape[:2]).to(dtype)} if extent == 9 else {}
    wanted = ref.relative_paged_attention(
        query.double(), cache.double(), layout, scale=0.3, sliding_window=window, **biases
    )
    for _ in range(2):  # the second layer of a step finds what the first one worked out
        got = backend.function(query, cache, layout, scale=0.3, sliding_window=window, **biases)
        assert got.dtype == dtype
        assert (got.double() - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max()
