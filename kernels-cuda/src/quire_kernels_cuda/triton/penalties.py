"""Penalties of tokens that were there before, counted on the device.

A row's history is counted into a table over the vocabulary, by adding whole numbers, whose order does not matter; then
the logits of the tokens that were counted change. Grids depend on the number of rows and the vocabulary only, lengths
are read on the device, and programs of rows without penalties end at once: so a captured graph stays right.

Shape legend: N rows of logits, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels_cuda.builds import Calls, NetworkShape
from quire_kernels_cuda.platform import Platform
from quire_ops import PenaltyTable, implements, ops

__all__ = ["calls", "clear_counts_kernel", "count_kernel", "penalize", "penalize_kernel"]

_IN_PROMPT = tl.constexpr(1 << 30)
"""Beside the number of times that a token is in the output: it is in the prompt."""
_PIECE = 1024
"""Tokens of a history that a program counts at once."""
_PIECES = 16
"""Programs that share a history."""


@triton.jit
def _is_penalized(repetition, presence, frequency, row):
    neutral = (tl.load(repetition + row) == 1.0) & (tl.load(presence + row) == 0.0)
    return (neutral & (tl.load(frequency + row) == 0.0)) == 0


@triton.jit
def clear_counts_kernel(rows, repetition, presence, frequency, counts, vocab_size, BLOCK: tl.constexpr):
    """counts [N, V] of rows with penalties become 0. A program has a block of a row."""
    program = tl.program_id(0).to(tl.int64)
    if _is_penalized(repetition, presence, frequency, tl.load(rows + program)):
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        tl.store(counts + program * vocab_size + token, tl.zeros([BLOCK], tl.int32), mask=token < vocab_size)


@triton.jit
def count_kernel(
    rows, positions, token_ids, num_prompt_tokens, repetition, presence, frequency, counts, vocab_size, row_len,
    PIECE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Count histories into `counts` [N, V]. A program has every PIECES-th piece of a row's history."""
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + program)
    if _is_penalized(repetition, presence, frequency, row):
        num_tokens = tl.load(positions + program) + 1
        num_prompt = tl.load(num_prompt_tokens + row)
        counts += program * vocab_size
        for begin in range(tl.program_id(1) * PIECE, num_tokens, PIECES * PIECE):
            place = begin + tl.arange(0, PIECE)
            token = tl.load(token_ids + row * row_len + place, mask=place < num_tokens, other=-1)
            known = (token >= 0) & (token < vocab_size)
            in_prompt = place < num_prompt
            tl.atomic_or(counts + token, tl.full([PIECE], _IN_PROMPT, tl.int32), mask=known & in_prompt)
            tl.atomic_add(counts + token, tl.full([PIECE], 1, tl.int32), mask=known & (in_prompt == 0))


@triton.jit
def penalize_kernel(logits, rows, repetition, presence, frequency, counts, vocab_size, BLOCK: tl.constexpr):
    """Change the logits [N, V] of tokens that were counted. A program has a block of a row."""
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + program)
    if _is_penalized(repetition, presence, frequency, row):
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        places = program * vocab_size + token
        counted = tl.load(counts + places, mask=token < vocab_size, other=0)
        value = tl.load(logits + places, mask=counted != 0, other=0.0)
        factor = tl.zeros([BLOCK], tl.float32) + tl.load(repetition + row)
        value = tl.where(value > 0.0, tl.div_rn(value, factor), value * factor)
        count = (counted & (_IN_PROMPT - 1)).to(tl.float32)
        value = value - tl.where(count > 0.0, tl.load(presence + row), 0.0)
        value = value - tl.load(frequency + row) * count
        tl.store(logits + places, value, mask=counted != 0)


@implements(ops.penalize)
def penalize(logits: Tensor, rows: Tensor, positions: Tensor, token_ids: Tensor, table: PenaltyTable) -> None:
    num_rows, vocab_size = logits.shape
    if not num_rows:
        return
    counts = torch.empty(num_rows, vocab_size, dtype=torch.int32, device=logits.device)
    block = min(4096, max(64, triton.next_power_of_2(vocab_size)))
    blocks = (num_rows, triton.cdiv(vocab_size, block))
    penalties = (table.repetition, table.presence, table.frequency)
    clear_counts_kernel[blocks](rows, *penalties, counts, vocab_size, BLOCK=block, num_warps=8)
    count_kernel[(num_rows, _PIECES)](
        rows, positions, token_ids, table.num_prompt_tokens, *penalties, counts, vocab_size, token_ids.stride(0),
        PIECE=_PIECE, PIECES=_PIECES, num_warps=4,
    )  # fmt: skip
    penalize_kernel[blocks](
        logits, rows, *penalties, counts, vocab_size, BLOCK=block, num_warps=8, enable_fp_fusion=False
    )


def calls(shape: NetworkShape, platform: Platform) -> Calls:
    """Penalties of some rows."""
    logits = torch.empty(16, shape.vocab_size, dtype=torch.float32, device="meta")
    rows = torch.empty(16, dtype=torch.int64, device="meta")
    numbers = torch.empty(256, dtype=torch.float32, device="meta")
    lengths = torch.empty(256, dtype=torch.int64, device="meta")
    table = PenaltyTable(repetition=numbers, presence=numbers, frequency=numbers, num_prompt_tokens=lengths)
    token_ids = torch.empty(256, 8192, dtype=torch.int32, device="meta")
    yield f"v{shape.vocab_size}", lambda: penalize(logits, rows, rows, token_ids, table)
