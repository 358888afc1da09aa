"""The inputs of a step, made on the device from what it keeps of each row.

The host sends one small array, [4, S]: rows, starts, ends and where each sequence's tokens begin. Everything that
depends on token ids or block ids is gathered on the device.

Shape legend: R rows, L token slots of a row, W blocks of a row's table, T tokens of the step, S sequences of the step,
B blocks of the widest sequence.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels_cuda.builds import Calls, NetworkShape
from quire_kernels_cuda.platform import Platform
from quire_ops import implements, ops, to_device
from quire_ops.step_inputs import GroupInputs, HostInts, RowTable, StepInputs

__all__ = ["block_table_kernel", "calls", "decode_inputs", "step_inputs", "tokens_kernel"]

_BLOCK = 256


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def tokens_kernel(
    token_ids, spans, input_ids, positions, query_start_loc, seq_lens, num_seqs, num_tokens, row_length,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Ids and positions of a sequence's tokens, and its lengths. spans [4, S]: rows, starts, ends, first tokens."""
    seq = tl.program_id(0)
    row, start = tl.load(spans + seq), tl.load(spans + num_seqs + seq)
    end, first = tl.load(spans + 2 * num_seqs + seq), tl.load(spans + 3 * num_seqs + seq)
    position = start + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = position < end
    token = tl.load(token_ids + row * row_length + position, mask=mask, other=0)
    tl.store(input_ids + first + position - start, token.to(tl.int64), mask=mask)
    tl.store(positions + first + position - start, position, mask=mask)
    if tl.program_id(1) == 0:
        tl.store(seq_lens + seq, end.to(tl.int32))
        tl.store(query_start_loc + seq, first.to(tl.int32))
        if seq == num_seqs - 1:
            tl.store(query_start_loc + num_seqs, num_tokens)


@triton.jit(do_not_specialize=["num_seqs", "width"])
def block_table_kernel(
    table, spans, block_table, slot_mapping, num_seqs, table_width, width, block_size, sliding_window,
    BLOCK: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """A sequence's blocks, and the slots of its tokens; the null block wherever nobody may look."""
    seq = tl.program_id(0)
    row, start = tl.load(spans + seq), tl.load(spans + num_seqs + seq)
    end, first = tl.load(spans + 2 * num_seqs + seq), tl.load(spans + 3 * num_seqs + seq)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    needed = (end + block_size - 1) // block_size
    seen = (lane < needed) & (lane < width)
    if HAS_WINDOW:
        seen = seen & (lane >= tl.maximum(start - sliding_window + 1, 0) // block_size)
    block = tl.load(table + row * table_width + lane, mask=seen, other=0)
    tl.store(block_table + seq.to(tl.int64) * width + lane, block, mask=lane < width)
    position = start + lane
    mask = position < end
    block = tl.load(table + row * table_width + position // block_size, mask=mask, other=0).to(tl.int64)
    tl.store(slot_mapping + first + lane, block * block_size + position % block_size, mask=mask)


@implements(ops.step_inputs)
def step_inputs(
    token_ids: Tensor, tables: tuple[RowTable, ...], rows: HostInts, starts: HostInts, ends: HostInts
) -> StepInputs:
    """One copy to the device, then a launch for tokens and one for each table."""
    device = token_ids.device
    query_lens = ends - starts
    num_tokens, longest, furthest = int(query_lens.sum()), int(query_lens.max()), int(ends.max())
    spans = to_device(np.stack((rows, starts, ends, np.cumsum(query_lens) - query_lens)), device)
    widths = [-(-furthest // block_size) for _, block_size, _ in tables]
    return _gather(token_ids, tables, spans, num_tokens, longest, widths)


@implements(ops.decode_inputs)
def decode_inputs(
    token_ids: Tensor, tables: tuple[RowTable, ...], spans: Tensor, num_tokens: int | None = None
) -> StepInputs:
    """The same launches, of which nothing depends on what is in `spans`."""
    total, longest = (spans.shape[1], 1) if num_tokens is None else (num_tokens, num_tokens)
    return _gather(token_ids, tables, spans, total, longest, [table.shape[1] for table, _, _ in tables])


def _gather(
    token_ids: Tensor, tables: tuple[RowTable, ...], spans: Tensor, num_tokens: int, longest: int, widths: list[int]
) -> StepInputs:
    """longest: most tokens of a sequence. widths: of the block tables that are made."""
    device, num_seqs = token_ids.device, spans.shape[1]

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    input_ids, positions = empty((num_tokens,), torch.int64), empty((num_tokens,), torch.int64)
    query_start_loc, seq_lens = empty((num_seqs + 1,), torch.int32), empty((num_seqs,), torch.int32)
    tokens_kernel[(num_seqs, triton.cdiv(longest, _BLOCK))](
        token_ids, spans, input_ids, positions, query_start_loc, seq_lens, num_seqs, num_tokens, token_ids.stride(0),
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    groups = []
    for (table, block_size, window), width in zip(tables, widths, strict=True):
        group = GroupInputs(empty((num_seqs, width), torch.int32), empty((num_tokens,), torch.int64))
        block_table_kernel[(num_seqs, triton.cdiv(max(width, longest), _BLOCK))](
            table, spans, group.block_table, group.slot_mapping, num_seqs, table.stride(0), width, block_size,
            window or 0, BLOCK=_BLOCK, HAS_WINDOW=window is not None, num_warps=4,
        )  # fmt: skip
        groups.append(group)
    return StepInputs(input_ids, positions, query_start_loc, seq_lens, tuple(groups))


def calls(shape: NetworkShape, platform: Platform) -> Calls:
    """A step of decodes."""

    def empty(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.int32, device="meta")

    window = 4096 if shape.sliding_window else None
    tables = (RowTable(empty(256, 512), shape.block_size, window),)
    ends = np.arange(1, 9)
    label = f"b{shape.block_size}{' window' if window else ''}"
    yield label, lambda: step_inputs(empty(256, 8192), tables, ends, ends - 1, ends)
    spans = torch.empty(4, 8, dtype=torch.int64, device="meta")
    yield label, lambda: decode_inputs(empty(256, 8192), tables, spans)
