"""Attention of tokens in trees: each gets, to the bit where that is promised, what its path alone would give."""

from __future__ import annotations

import random

import pytest
import torch
from ops_layouts import Layout, grow_trees, poisoned_cache, random_layout
from torch import Tensor

from quire_ops import OpBackend, OpRequest, op_table, ops
from quire_ops import ops as ref

BACKENDS = [b for b in op_table().backends(ops.paged_attention) if b.trees and b.refusal(OpRequest()) is None]
LATENT = [b for b in op_table().backends(ops.latent_attention) if b.trees and b.refusal(OpRequest()) is None]
LENS = [(12, 75), (1, 30), (5, 1100), (3, 9)]
"""A tree, a decode, a later part of a tree, a chunk of a prompt."""
ROOTS = {0: 63, 2: 1090}
"""Sequence -> where its tree begins: the last ones of the positions behind it are tokens of earlier passes."""


def alone(cache: Tensor, table: Tensor, places: list[int], token_dim: int) -> tuple[Tensor, Layout]:
    """A cache with the tokens of a path only, one behind another, and the layout of its last token."""
    size = cache.shape[token_dim]
    layout, num_blocks = random_layout(random.Random(1), [(1, len(places))], size, shuffle=False)
    slots = torch.tensor(places)
    copied = torch.zeros(num_blocks, *cache.shape[1:], dtype=cache.dtype)
    rows = cache.movedim(token_dim, 1)[table[slots // size].long(), slots % size]
    new = layout.block_table[0].long()[torch.arange(len(places)) // size]
    copied.movedim(token_dim, 1)[new, torch.arange(len(places)) % size] = rows
    return copied, layout


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "window", "soft_cap", "alibi", "sinks"),
    [
        (torch.float32, 16, None, None, False, False),
        (torch.bfloat16, 16, None, None, False, False),
        (torch.bfloat16, 64, None, None, False, False),
        (torch.float32, 16, 70, None, False, False),
        (torch.float32, 16, 5, 3.0, True, True),
    ],
)
def test_each_token_sees_its_path(
    backend: OpBackend,
    dtype: torch.dtype,
    head_dim: int,
    window: int | None,
    soft_cap: float | None,
    alibi: bool,
    sinks: bool,
) -> None:
    """Heads of 64 numbers in bfloat16 go by products of pairs, and by tiles, where a processor has them."""
    torch.manual_seed(2)
    layout, num_blocks = random_layout(random.Random(3), LENS, 16, shuffle=True)
    paths = grow_trees(layout, ROOTS, random.Random(4))
    cache = poisoned_cache(layout, num_blocks, 2, head_dim, dtype)
    query = torch.randn(sum(layout.query_lens), 4, head_dim).to(dtype)
    options = {
        "scale": 0.25,
        "sliding_window": window,
        "soft_cap": soft_cap,
        "alibi_slopes": torch.linspace(0.0, 0.3, 4) if alibi else None,
        "sinks": torch.linspace(-1, 1, 4).to(dtype) if sinks else None,
    }
    got = backend.function(query, cache, layout, **options)
    if backend.batch_invariant:
        before = torch.get_num_threads()
        torch.set_num_threads(5)  # so that the long sequence is cut
        assert torch.equal(backend.function(query, cache, layout, **options), got)
        torch.set_num_threads(before)
    layout.paths, whole, layout.derived = None, layout.paths, {}
    plain = backend.function(query, cache, layout, **options)
    layout.paths = whole
    row_of = [row for row, count in enumerate(layout.query_lens) for _ in range(count)]
    assert len(paths) == 17
    for token, row in enumerate(row_of):
        if token not in paths:
            assert torch.equal(got[token], plain[token])
            continue
        copied, line = alone(cache, layout.block_table[row], paths[token], 3)
        expected = backend.function(query[token : token + 1], copied, line, **options)[0]
        if backend.batch_invariant:
            assert torch.equal(got[token], expected)
        exact = ref.paged_attention(query[token : token + 1].double(), copied.double(), line, **options)[0]
        assert (got[token] - exact).abs().max() < (2e-2 if dtype == torch.bfloat16 else 5e-6)


SPANS = {0: (165, 290), 2: (3, 88)}
"""Sequence -> tokens of a step that all see one another, such as those of an image."""


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.float32, 16), (torch.bfloat16, 16), (torch.bfloat16, 64)], ids=str
)
def test_tokens_of_a_span_see_those_behind_them(backend: OpBackend, dtype: torch.dtype, head_dim: int) -> None:
    torch.manual_seed(8)
    layout, num_blocks = random_layout(random.Random(9), [(150, 300), (1, 30), (90, 90)], 16, shuffle=True)
    cache = poisoned_cache(layout, num_blocks, 2, head_dim, dtype)
    query = torch.randn(sum(layout.query_lens), 16, head_dim).to(dtype)  # more than a kernel takes at once
    layout.paths = torch.full((len(query), 2 + 150), -1, dtype=torch.int32)
    seen: list[tuple[int, int]] = []  # of each token: row, how many it sees
    for row, (query_len, kv_len) in enumerate(zip(layout.query_lens, layout.kv_lens, strict=True)):
        context, (begin, end) = kv_len - query_len, SPANS.get(row, (0, 0))
        for place in range(context, kv_len):
            count = end if begin <= place < end else place + 1
            if row in SPANS:
                way = torch.tensor([count - 1, context, *range(context, count)])
                layout.paths[len(seen), : len(way)] = way
            seen.append((row, count))
    got = backend.function(query, cache, layout, scale=0.25)
    for token in range(0, len(query), 7):
        row, count = seen[token]
        copied, line = alone(cache, layout.block_table[row], list(range(count)), 3)
        exact = ref.paged_attention(query[token : token + 1].double(), copied.double(), line, scale=0.25)[0]
        assert (got[token] - exact).abs().max() < (2e-2 if dtype == torch.bfloat16 else 5e-6)


@pytest.mark.parametrize("backend", LATENT, ids=lambda backend: backend.name)
def test_latent_attention_sees_paths(backend: OpBackend) -> None:
    torch.manual_seed(5)
    layout, num_blocks = random_layout(random.Random(6), LENS, 16, shuffle=True)
    paths = grow_trees(layout, ROOTS, random.Random(7))
    cache = torch.randn(num_blocks, 16, 24)
    query = torch.randn(sum(layout.query_lens), 3, 24)
    got = backend.function(query, cache, layout, scale=0.3, rank=16)
    for token, places in paths.items():
        copied, line = alone(cache, layout.block_table[0 if token < LENS[0][0] else 2], places, 1)
        expected = ref.latent_attention(query[token : token + 1].double(), copied.double(), line, scale=0.3, rank=16)
        assert (got[token] - expected[0]).abs().max() < 5e-6
        if backend.batch_invariant:
            alone_again = backend.function(query[token : token + 1], copied, line, scale=0.3, rank=16)
            assert torch.equal(got[token], alone_again[0])
