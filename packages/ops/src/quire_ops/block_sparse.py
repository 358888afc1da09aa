"""Attention over some keys and values of a sequence: which blocks of tokens an index finds, and attention over these
tokens alone (Qwen4-Exp).

Shape legend: T tokens, Hq query heads, Hkv key-value heads, Hi heads of the index, D their dimension, X elements of a
row of the cache, K tokens attended to, B whole blocks of tokens in a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_ops.kv_format import decode_rows, rows_of
from quire_ops.kv_reference import decode_row, read_row
from quire_ops.layout import PagedLayout
from quire_ops.op import op
from quire_ops.sparse_attention import sequences_of, tokens_of
from quire_ops.table import torch_backend_for

__all__ = ["index_topk_blocks", "sparse_attention"]

WORKSPACE = 1 << 19
"""Numbers that the torch backend holds at once for the tokens of one call."""


@op
def index_topk_blocks(query: Tensor, key_cache: Tensor, layout: PagedLayout, *, block_tokens: int, k: int) -> Tensor:
    """Positions of the tokens that a token attends to where an index scores blocks of `block_tokens` tokens, counted
    from the first of its sequence: those of the k blocks that end at the token or before it and have the largest scores
    for it, sum over h of relu(query[h] . key of the block); and those behind the last such block, up to the token. A
    block's key is that of its last token; other keys are not read. Their order, and which of equals, is left open.

    query [T, Hi, D], key_cache [num_blocks, block_size, D] -> [T, K] int64, K = block_tokens * min(k, B of the longest
    sequence) + block_tokens - 1; -1 where there are fewer."""
    num = min(k, max(layout.kv_lens) // block_tokens)
    out = torch.full((len(query), block_tokens * num + block_tokens - 1), -1, device=query.device)
    for token, position, blocks in tokens_of(layout):
        ends = range(block_tokens - 1, position + 1, block_tokens)
        slots = [(blocks[end // layout.block_size], end % layout.block_size) for end in ends]
        seen = list(range(len(ends) * block_tokens, position + 1))
        if slots:
            keys = torch.stack([key_cache[slot] for slot in slots]).double()  # [B, D]
            scores = torch.relu(query[token].double() @ keys.T).sum(0)
            for best in torch.sort(scores, descending=True, stable=True).indices[:num].tolist():
                seen += range(best * block_tokens, (best + 1) * block_tokens)
        out[token, : len(seen)] = torch.tensor(seen)
    return out


@op
def sparse_attention(
    query: Tensor, kv_cache: Tensor, slots: Tensor, *, scale: float, kv_scale: Tensor | None = None
) -> Tensor:
    """`paged_attention` of each token over the keys and values in its own slots alone; slots of -1 count for nothing,
    and each token has another one. Other slots are never read.

    query [T, Hq, D], kv_cache [num_blocks, 2, Hkv, block_size, X], slots [T, K] int64, kv_scale [2, Hkv] float32 of an
    fp8 cache -> [T, Hq, D], dtype of query."""
    out = torch.empty_like(query)
    num_kv_heads, block_size = kv_cache.shape[2:4]
    group_size = query.shape[1] // num_kv_heads
    scales = torch.ones(2, num_kv_heads) if kv_scale is None else kv_scale
    for token, own in enumerate(slots.tolist()):
        seen = [divmod(slot, block_size) for slot in own if slot >= 0]
        for head in range(query.shape[1]):
            keys, values = (
                torch.stack(
                    [
                        decode_row(
                            read_row(kv_cache[block, which, head // group_size], place),
                            float(scales[which, head // group_size]),
                        )
                        for block, place in seen
                    ]
                )
                for which in range(2)
            )
            shares = torch.softmax(keys @ query[token, head].double() * scale, dim=-1)
            out[token, head] = (shares @ values).to(query.dtype)
    return out


@torch_backend_for(index_topk_blocks)
def _torch_index_blocks(query: Tensor, key_cache: Tensor, layout: PagedLayout, *, block_tokens: int, k: int) -> Tensor:
    """Sequence by sequence."""
    num = min(k, max(layout.kv_lens) // block_tokens)
    out = torch.full((len(query), block_tokens * num + block_tokens - 1), -1, device=query.device)
    places = torch.arange(block_tokens, device=query.device)
    for seq in sequences_of(layout):
        ends = seq.slots[block_tokens - 1 :: block_tokens]
        keys = key_cache[ends // key_cache.shape[1], ends % key_cache.shape[1]].float()  # [B, D]
        length = min(num, len(ends))
        rows = max(1, WORKSPACE // (query.shape[1] * max(1, len(ends))))
        for begin in range(seq.query_begin, seq.query_begin + seq.query_len, rows):
            count = min(rows, seq.query_begin + seq.query_len - begin)
            part, first = slice(begin, begin + count), seq.kv_len - seq.query_len + begin - seq.query_begin
            position = first + torch.arange(count, device=query.device)[:, None]
            whole = (position + 1) // block_tokens  # blocks that end at the token or before it
            last = whole * block_tokens + places[:-1]
            out[part, : block_tokens - 1] = torch.where(last <= position, last, -1)
            if length:
                scores = torch.relu(query[part].float() @ keys.T).sum(1)  # [n, B]
                later = torch.arange(len(ends), device=query.device) >= whole
                best, blocks = scores.masked_fill_(later, -torch.inf).topk(length, dim=-1)
                chosen = torch.where(best[..., None] == -torch.inf, -1, blocks[..., None] * block_tokens + places)
                out[part, block_tokens - 1 : (length + 1) * block_tokens - 1] = chosen.flatten(1)
    return out


@torch_backend_for(sparse_attention)
def _torch_sparse_attention(
    query: Tensor, kv_cache: Tensor, slots: Tensor, *, scale: float, kv_scale: Tensor | None = None
) -> Tensor:
    """The keys and values of a few tokens are gathered at a time."""
    num_kv_heads, block_size = kv_cache.shape[2:4]
    out = torch.empty_like(query)
    unused = slots < 0
    slots = torch.where(unused, slots.amax(1, keepdim=True), slots)  # whatever else is there is not read
    tokens = max(1, WORKSPACE // (slots.shape[1] * 2 * num_kv_heads * query.shape[2]))
    scales = None if kv_scale is None else kv_scale[..., None]
    for begin in range(0, len(query), tokens):
        part = slice(begin, begin + tokens)
        blocks, offsets = slots[part] // block_size, slots[part] % block_size
        rows = [stored[blocks, :, :, offsets] for stored in rows_of(kv_cache)]  # [n, K, 2, Hkv, ...]
        keys, values = decode_rows(rows, query.dtype, scales).permute(2, 0, 3, 1, 4)  # [n, Hkv, K, D] each
        own = query[part].unflatten(1, (num_kv_heads, -1))  # [n, Hkv, Hq / Hkv, D]
        scores = (own @ keys.transpose(2, 3)).float() * scale
        shares = torch.softmax(scores.masked_fill_(unused[part, None, None], -torch.inf), dim=-1)
        out[part] = (shares.to(query.dtype) @ values).flatten(1, 2)
    return out
