"""Chunked attention as plain attention: each chunk of a sequence is a sequence of its own to the kernels.

Tokens attend to those of their chunk only, chunks begin where blocks do, and positions are in the keys already. So a
step's queries are cut where chunks end, and each piece gets the part of the block table that its chunk has.
"""

from __future__ import annotations

import torch

from quire_ops import PagedLayout

__all__ = ["chunked"]


def chunked(metadata: PagedLayout, chunk_tokens: int) -> PagedLayout:
    """Metadata of a step's tokens with a sequence for each chunk that has some of them, over the cache as it is.

    Args:
        metadata: Of a step; keeps the result for the other layers.
        chunk_tokens: Tokens of a chunk, a multiple of the block size.
    """
    pieces: PagedLayout | None = metadata.derived.get(("chunks", chunk_tokens))
    if pieces is None:
        pieces = metadata.derived["chunks", chunk_tokens] = _cut(metadata, chunk_tokens)
    return pieces


def _cut(metadata: PagedLayout, chunk_tokens: int) -> PagedLayout:
    size, table = metadata.block_size, metadata.block_table
    rows, first_blocks, query_lens, kv_lens = [], [], [], []
    for row, (query_len, kv_len) in enumerate(zip(metadata.query_lens, metadata.kv_lens, strict=True)):
        position = kv_len - query_len
        while position < kv_len:
            begin = position // chunk_tokens * chunk_tokens
            end = min(begin + chunk_tokens, kv_len)
            rows.append(row)
            first_blocks.append(begin // size)
            query_lens.append(end - position)
            kv_lens.append(end - begin)
            position = end
    columns = torch.arange(-(-max(kv_lens) // size))
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    blocks = (torch.tensor(first_blocks)[:, None] + columns).clamp_max(table.shape[1] - 1)
    piece_tables = table[torch.tensor(rows)[:, None].to(table.device), blocks.to(table.device)]
    foreign = columns >= -(-lens // size)[:, None]
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    return PagedLayout(
        query_start_loc=starts.to(table.device),
        seq_lens=lens.to(table.device),
        block_table=piece_tables.masked_fill(foreign.to(table.device), 0),
        slot_mapping=metadata.slot_mapping,
        block_size=size,
        query_lens=query_lens,
        kv_lens=kv_lens,
    )
