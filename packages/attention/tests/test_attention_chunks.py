"""Attention within chunks: against a mask over the whole sequence, in chunks of prompts and in decodes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire_attention import Attention, ForwardBatch, select_attention_backend
from quire_ops import OpRequest, PagedLayout, kv_cache_shape

CHUNK, BLOCK, HEADS, KV_HEADS, DIM = 8, 4, 4, 2, 16


def batch_of(kv_cache: Tensor, lens: list[tuple[int, int]]) -> ForwardBatch:
    """lens: (tokens before, tokens of this step) of each sequence; blocks before the chunk of the first are gone."""
    per_sequence = 10
    tables = []
    for row, (before, _) in enumerate(lens):
        gone = before // CHUNK * CHUNK // BLOCK
        tables.append([0] * gone + list(range(1 + row * per_sequence + gone, 1 + (row + 1) * per_sequence)))
    positions = [list(range(before, before + count)) for before, count in lens]
    slots = [(1 + row * per_sequence) * BLOCK + p for row, each in enumerate(positions) for p in each]
    starts = torch.tensor([0, *(count for _, count in lens)]).cumsum(0)
    metadata = PagedLayout(
        query_start_loc=starts.int(),
        seq_lens=torch.tensor([before + count for before, count in lens], dtype=torch.int32),
        block_table=torch.tensor(tables, dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        block_size=BLOCK,
        query_lens=[count for _, count in lens],
        kv_lens=[before + count for before, count in lens],
    )
    return ForwardBatch(
        input_ids=torch.zeros(len(slots), dtype=torch.int64),
        positions=torch.tensor([p for each in positions for p in each]),
        attention=(metadata,),
        group_of_layer=(0,),
        kv_caches=(kv_cache,),
    )


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_equals_a_mask_over_everything(backend: str) -> None:
    torch.manual_seed(0)
    total = [21, 33]
    query = [torch.randn(n, HEADS, DIM) for n in total]
    key, value = ([torch.randn(n, KV_HEADS, DIM) for n in total] for _ in range(2))
    request = OpRequest(sizes={"head_dim": DIM, "queries_per_kv_head": HEADS // KV_HEADS})
    chosen = select_attention_backend(request, backend).backend
    cache = torch.full(kv_cache_shape(30, BLOCK, KV_HEADS, DIM), float("nan"))
    attend = Attention(chosen, 0, scale=0.25, chunk_tokens=CHUNK)
    done, outs = [0, 0], [[], []]  # type: ignore[var-annotated]
    for counts in ((5, 20), (14, 1), (1, 11), (1, 1)):  # across no border, several, exactly to one
        lens = list(zip(done, counts, strict=True))
        parts = [
            torch.cat([each[b : b + n] for each, (b, n) in zip(tensors, lens, strict=True)])
            for tensors in (query, key, value)
        ]
        out = attend(*parts, batch_of(cache, lens)).split(counts)
        for row, (got, count) in enumerate(zip(out, counts, strict=True)):
            outs[row].append(got)
            done[row] += count
    assert done == total
    for row, n in enumerate(total):
        t = torch.arange(n)
        mask = (t[:, None] >= t) & (t[:, None] // CHUNK == t // CHUNK)
        heads = [part[row].transpose(0, 1) for part in (query, key, value)]
        wanted = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, scale=0.25, enable_gqa=True)
        assert torch.allclose(torch.cat(outs[row]), wanted.transpose(0, 1), atol=1e-5)
