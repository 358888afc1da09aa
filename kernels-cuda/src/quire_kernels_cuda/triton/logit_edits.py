"""Lists of tokens that each row brings: biases, tokens that may be sampled, and tokens that may not yet or not here.

Two launches: what is added, then what is taken out, so that both may be of one token. Grids depend on the number of
rows and the vocabulary only, and programs of rows without lists end at once: so a captured graph stays right.

Shape legend: N rows of logits, V vocabulary, W words of a mask, K entries of a row, P tokens before one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels_cuda.builds import Calls, NetworkShape
from quire_kernels_cuda.platform import Platform
from quire_ops import LogitEditTable, implements, ops

__all__ = ["bias_kernel", "calls", "edit_logits", "exclude_kernel"]

_ENTRIES = 128
"""Entries that a program looks at together."""


@triton.jit
def _acting(
    entry, count, row, position, num_prompt, until, prefixes, token_ids, row_len, K: tl.constexpr, P: tl.constexpr
):
    """Which of some entries of a row act behind a position."""
    inside = entry < count
    place = row * K + entry
    acts = inside & (position + 1 - num_prompt < tl.load(until + place, mask=inside, other=0))
    for before in tl.static_range(P):
        at = position - (P - 1) + before
        found = tl.load(token_ids + row * row_len + at, mask=at >= 0, other=-2)
        wanted = tl.load(prefixes + place * P + before, mask=inside, other=-1)
        acts = acts & ((wanted == -1) | (wanted == found))
    return acts


@triton.jit
def bias_kernel(
    logits, rows, positions, token_ids, num_prompt_tokens, num_entries, ids, values, until, prefixes, vocab_size,
    row_len,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add what entries say to the logits [N, V]. A program has a row, whose finite values are of different tokens."""
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + program)
    count = tl.load(num_entries + row)
    position = tl.load(positions + program)
    num_prompt = tl.load(num_prompt_tokens + row)
    for begin in range(0, count, BLOCK):
        entry = begin + tl.arange(0, BLOCK)
        acts = _acting(entry, count, row, position, num_prompt, until, prefixes, token_ids, row_len, K, P)
        value = tl.load(values + row * K + entry, mask=acts, other=0.0)
        place = program * vocab_size + tl.load(ids + row * K + entry, mask=acts, other=0)
        added = acts & (value > float("-inf"))
        tl.store(logits + place, tl.load(logits + place, mask=added, other=0.0) + value, mask=added)


@triton.jit
def exclude_kernel(
    logits, rows, positions, token_ids, num_prompt_tokens, is_restricted, allowed, num_entries, ids, values, until,
    prefixes, vocab_size, row_len, num_words,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Logits [N, V] of tokens that may not be sampled become -inf. A program has a block of a row; the first of a row
    has its entries, too."""
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + program)
    if tl.load(is_restricted + row) != 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(allowed + row * num_words + token // 32, mask=token < vocab_size, other=-1)
        excluded = (token < vocab_size) & (((word >> (token % 32)) & 1) == 0)
        tl.store(logits + program * vocab_size + token, tl.full([BLOCK], float("-inf"), tl.float32), mask=excluded)
    if tl.program_id(1) == 0:
        count = tl.load(num_entries + row)
        position = tl.load(positions + program)
        num_prompt = tl.load(num_prompt_tokens + row)
        for begin in range(0, count, ENTRIES):
            entry = begin + tl.arange(0, ENTRIES)
            acts = _acting(entry, count, row, position, num_prompt, until, prefixes, token_ids, row_len, K, P)
            value = tl.load(values + row * K + entry, mask=acts, other=0.0)
            place = program * vocab_size + tl.load(ids + row * K + entry, mask=acts, other=0)
            tl.store(logits + place, value, mask=acts & (value == float("-inf")))


@implements(ops.edit_logits)
def edit_logits(logits: Tensor, rows: Tensor, positions: Tensor, token_ids: Tensor, table: LogitEditTable) -> None:
    num_rows, vocab_size = logits.shape
    if not num_rows:
        return
    lists = (table.num_entries, table.ids, table.values, table.until, table.prefixes)
    sizes = {"K": table.ids.shape[1], "P": table.prefixes.shape[2]}
    bias_kernel[(num_rows,)](
        logits, rows, positions, token_ids, table.num_prompt_tokens, *lists, vocab_size, token_ids.stride(0),
        **sizes, BLOCK=_ENTRIES, num_warps=4,
    )  # fmt: skip
    block = min(4096, max(64, triton.next_power_of_2(vocab_size)))
    exclude_kernel[(num_rows, triton.cdiv(vocab_size, block))](
        logits, rows, positions, token_ids, table.num_prompt_tokens, table.is_restricted, table.allowed, *lists,
        vocab_size, token_ids.stride(0), table.allowed.shape[1], **sizes, BLOCK=block, ENTRIES=_ENTRIES, num_warps=4,
    )  # fmt: skip


def calls(shape: NetworkShape, platform: Platform) -> Calls:
    """Lists of some rows."""
    logits = torch.empty(16, shape.vocab_size, dtype=torch.float32, device="meta")
    rows = torch.empty(16, dtype=torch.int64, device="meta")
    table = LogitEditTable.empty(torch.empty(256, dtype=torch.int64, device="meta"), shape.vocab_size, 512, 7)
    token_ids = torch.empty(256, 8192, dtype=torch.int32, device="meta")
    yield f"v{shape.vocab_size}", lambda: edit_logits(logits, rows, rows, token_ids, table)
