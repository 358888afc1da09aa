"""Attention over parts of a sequence, and their merge: against the references, and these against plain attention."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from ops_layouts import Layout, encoded_cache, poisoned_cache, random_layout
from torch import Tensor

from quire_ops import Op, OpBackend, OpRequest, op_table, ops
from quire_ops import ops as ref

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2}
MIXES = {
    "decodes": [(1, 5), (1, 40), (1, 0), (1, 33), (1, 40)],
    "nothing": [(1, 0), (3, 0)],
    "prefills": [(9, 5), (1, 1), (30, 15)],
    "chunks and decodes": [(1, 17), (7, 25), (1, 0), (20, 10), (2, 0), (3, 4), (1, 2)],
}
"""(query tokens, tokens of the sequence in the cache)."""


def serving(op: Op[..., Any]) -> list[OpBackend]:
    backends = [backend for backend in op_table().backends(op) if backend.name != "reference"]
    return [backend for backend in backends if backend.refusal(OpRequest()) is None]


def make(mix: str, block_size: int) -> tuple[Layout, int, Tensor]:
    """A layout, its number of blocks, and how many tokens each token sees."""
    rng = random.Random(mix)
    lens = MIXES[mix]
    layout, num_blocks = random_layout(rng, lens, block_size, shuffle=True)
    visible = [sorted([*(rng.randint(0, kv) for _ in range(count - 1)), kv]) for count, kv in lens]
    return layout, num_blocks, torch.tensor([each for row in visible for each in row], dtype=torch.int32)


def check(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], tolerance: float) -> None:
    for each, expected in zip(got, wanted, strict=True):
        assert each.dtype == torch.float32
        assert torch.equal(each.isinf(), expected.isinf())
        torch.testing.assert_close(each, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", serving(ops.paged_attention_with_lse), ids=lambda backend: backend.name)
@pytest.mark.parametrize(
    "options", [{}, {"soft_cap": 2.0}, {"alibi": True}, {"cache": "fp8"}, {"cache": "int8"}], ids=str
)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("block_size", [1, 8])
def test_paged_attention_equals_reference(
    backend: OpBackend, mix: str, dtype: torch.dtype, block_size: int, options: dict[str, Any]
) -> None:
    torch.manual_seed(1)
    layout, num_blocks, visible = make(mix, block_size)
    cache = poisoned_cache(layout, num_blocks, 2, 16, dtype)
    named: dict[str, Any] = {"scale": 0.25, "soft_cap": options.get("soft_cap")}
    named["alibi_slopes"] = torch.rand(6) / 8 if "alibi" in options else None
    if "cache" in options:
        name = torch.float8_e4m3fn if options["cache"] == "fp8" else torch.int8
        named["kv_scale"] = torch.rand(2, 2) + 0.5 if options["cache"] == "fp8" else None
        scale = None if named["kv_scale"] is None else named["kv_scale"][..., None, None]
        cache = encoded_cache(cache.nan_to_num(), name, scale)
    query = torch.randn(sum(layout.query_lens), 6, 16).to(dtype)
    wanted = ref.paged_attention_with_lse(query, cache, layout, visible, **named)
    for _ in range(2):  # the second layer of a step finds what the first one worked out
        check(backend.function(query, cache, layout, visible, **named), wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("backend", serving(ops.latent_attention_with_lse), ids=lambda backend: backend.name)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_latent_attention_equals_reference(backend: OpBackend, mix: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    layout, num_blocks, visible = make(mix, 4)
    cache = poisoned_cache(layout, num_blocks, 1, 24, dtype)[:, 0, 0].contiguous()
    query = torch.randn(sum(layout.query_lens), 5, 24).to(dtype)
    wanted = ref.latent_attention_with_lse(query, cache, layout, visible, scale=0.25, rank=16)
    for _ in range(2):
        got = backend.function(query, cache, layout, visible, scale=0.25, rank=16)
        check(got, wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("backend", serving(ops.merge_attention_states), ids=lambda backend: backend.name)
@pytest.mark.parametrize("sinks", [False, True])
def test_merge_equals_reference(backend: OpBackend, sinks: bool) -> None:
    torch.manual_seed(3)
    out, lse = torch.randn(3, 7, 4, 16), 4 * torch.randn(3, 7, 4)
    lse[1, :4] = lse[:, 2] = -torch.inf
    out[lse == -torch.inf] = 0.0
    scores = torch.randn(4) if sinks else None
    got, wanted = backend.function(out, lse, scores), ref.merge_attention_states(out, lse, scores)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    assert (got[2] == 0).all()


def test_merge_survives_sums_that_no_float_holds() -> None:
    """Scores may be as large as they like: only their differences are raised to powers."""
    out, lse = torch.tensor([[[[1.0]]], [[[3.0]]]]), torch.tensor([[[5000.0]], [[5000.0]]])
    for backend in serving(ops.merge_attention_states):
        assert backend.function(out, lse).item() == 2.0


@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_references_merge_into_plain_attention(num_parts: int) -> None:
    """Tokens dealt out to caches of their own, attended to there, and merged."""
    torch.manual_seed(4)
    lens, block_size = [(1, 9), (13, 20), (6, 6)], 6
    layout, num_blocks = random_layout(random.Random(5), lens, block_size, shuffle=True)
    cache = poisoned_cache(layout, num_blocks, 2, 16, torch.float32)
    query, sinks = torch.randn(20, 4, 16), torch.randn(4)
    wanted = ref.paged_attention(query, cache, layout, scale=0.25, sinks=sinks)
    seen = torch.tensor([kv - count + i + 1 for count, kv in lens for i in range(count)])
    outs, sums = [], []
    for part in range(num_parts):
        own = Layout(
            block_table=layout.block_table,
            query_start_loc=layout.query_start_loc,
            slot_mapping=layout.slot_mapping,
            block_size=block_size // num_parts,
            query_lens=layout.query_lens,
            kv_lens=[(kv - 1 - part + num_parts) // num_parts for kv in layout.kv_lens],
        )
        visible = ((seen - 1 - part + num_parts) // num_parts).int()
        out, lse = ref.paged_attention_with_lse(query, cache[:, :, :, part::num_parts], own, visible, scale=0.25)
        outs.append(out)
        sums.append(lse)
    got = ref.merge_attention_states(torch.stack(outs), torch.stack(sums), sinks)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
