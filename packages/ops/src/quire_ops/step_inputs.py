"""Inputs of a step, gathered from what is kept of each row.

By torch there is no loop over tokens: index arithmetic happens on the host, from numbers that are known there (numpy);
everything that depends on token ids or block ids is gathered on the device, so that a token sampled a moment ago is
found without a round trip.

Shape legend: R rows, L token slots of a row, T tokens, S sequences of the step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from quire_ops.op import op
from quire_ops.staging import to_device
from quire_ops.table import torch_backend_for

__all__ = ["GroupInputs", "HostInts", "RowTable", "StepInputs", "decode_inputs", "step_inputs"]


class RowTable(NamedTuple):
    """The block tables of all rows (places of running requests), for one group of layers that share them."""

    table: Tensor
    """[R, W] int32, contiguous: block ids in token order."""
    block_size: int
    sliding_window: int | None = None


class GroupInputs(NamedTuple):
    """Where a step's tokens are in the paged cache of one group of layers."""

    block_table: Tensor
    """[S, B] int32, B the most blocks that a sequence of the step needs; 0, the null block, wherever nobody may look:
    beyond a sequence's tokens, and before the sliding window of its first token."""
    slot_mapping: Tensor
    """[T] int64: block id * block_size + offset."""


class StepInputs(NamedTuple):
    """What networks get to see of a step."""

    input_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64."""
    query_start_loc: Tensor
    """[S + 1] int32: first token of each sequence, then T."""
    seq_lens: Tensor
    """[S] int32: `ends` on the device."""
    groups: tuple[GroupInputs, ...]


HostInts = NDArray[np.int64]
"""Numbers that are known on the host; contiguous."""


@op
def step_inputs(
    token_ids: Tensor, tables: tuple[RowTable, ...], rows: HostInts, starts: HostInts, ends: HostInts
) -> StepInputs:
    """Gather the inputs of a step: sequence s computes the tokens at positions starts[s] to ends[s] - 1 of row rows[s],
    at least one. Serves networks of any dtype. token_ids [R, L] int32, tables of each KV cache group, rows, starts and
    ends [S] on the host."""
    spans = list(zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True))
    tokens = [(row, position) for row, start, end in spans for position in range(start, end)]
    query_start_loc = [0]
    for _, start, end in spans:
        query_start_loc.append(query_start_loc[-1] + end - start)

    def block_table(table: RowTable) -> list[list[int]]:
        window = table.sliding_window
        width = max(-(-end // table.block_size) for _, _, end in spans)
        block_rows = []
        for row, start, end in spans:
            first = 0 if window is None else max(start - window + 1, 0)
            seen = range(first // table.block_size, -(-end // table.block_size))
            block_rows.append([int(table.table[row, block]) if block in seen else 0 for block in range(width)])
        return block_rows

    def slots(table: RowTable) -> list[int]:
        size = table.block_size
        return [int(table.table[row, position // size]) * size + position % size for row, position in tokens]

    device = token_ids.device
    return StepInputs(
        input_ids=torch.tensor([int(token_ids[token]) for token in tokens], dtype=torch.int64, device=device),
        positions=torch.tensor([position for _, position in tokens], dtype=torch.int64, device=device),
        query_start_loc=torch.tensor(query_start_loc, dtype=torch.int32, device=device),
        seq_lens=torch.tensor([end for _, _, end in spans], dtype=torch.int32, device=device),
        groups=tuple(
            GroupInputs(
                torch.tensor(block_table(table), dtype=torch.int32, device=device),
                torch.tensor(slots(table), dtype=torch.int64, device=device),
            )
            for table in tables
        ),
    )


@op
def decode_inputs(
    token_ids: Tensor, tables: tuple[RowTable, ...], spans: Tensor, num_tokens: int | None = None
) -> StepInputs:
    """`step_inputs` from numbers on the device, so that a captured graph can do it again with others. Block tables are
    as wide as those of the rows. token_ids [R, L] int32, spans [4, S] int64 on the device: rows, starts, ends and first
    tokens. num_tokens is T, and sequences may have no token; without it each has one, and first tokens are 0 to
    S - 1."""
    rows, starts, ends, _ = spans.cpu().numpy()
    inputs = step_inputs(token_ids, tables, rows, starts, ends)
    groups = tuple(
        GroupInputs(
            F.pad(group.block_table, (0, table.table.shape[1] - group.block_table.shape[1])), group.slot_mapping
        )
        for group, table in zip(inputs.groups, tables, strict=True)
    )
    return inputs._replace(groups=groups)


@torch_backend_for(decode_inputs)
def _torch_decode_inputs(
    token_ids: Tensor, tables: tuple[RowTable, ...], spans: Tensor, num_tokens: int | None = None
) -> StepInputs:
    """Sends nothing from the host, and asks nothing of the device."""
    rows, starts, ends, firsts = spans
    token_rows, positions = rows, starts
    if num_tokens is not None:
        token = torch.arange(num_tokens, device=spans.device)
        sequence = torch.searchsorted(firsts, token, right=True) - 1
        token_rows, positions = rows[sequence], starts[sequence] + token - firsts[sequence]

    def group(table: RowTable) -> GroupInputs:
        size = table.block_size
        found = table.table.view(-1).index_select(0, token_rows * table.table.shape[1] + positions // size)
        slots = found.to(torch.int64).mul_(size).add_(positions % size)
        blocks = table.table.index_select(0, rows)
        place = torch.arange(blocks.shape[1], device=spans.device)
        outside = place >= (ends + size - 1).div_(size, rounding_mode="floor")[:, None]
        if table.sliding_window is not None:
            outside |= (
                place < (starts - table.sliding_window + 1).clamp_min_(0).div_(size, rounding_mode="floor")[:, None]
            )
        return GroupInputs(blocks.masked_fill_(outside, 0), slots)

    return StepInputs(
        input_ids=token_ids.view(-1).index_select(0, token_rows * token_ids.shape[1] + positions).to(torch.int64),
        positions=positions,
        query_start_loc=torch.cat((firsts, (firsts + ends - starts)[-1:])).to(torch.int32),
        seq_lens=ends.to(torch.int32),
        groups=tuple(group(table) for table in tables),
    )


@torch_backend_for(step_inputs)
def _torch_step_inputs(
    token_ids: Tensor, tables: tuple[RowTable, ...], rows: HostInts, starts: HostInts, ends: HostInts
) -> StepInputs:
    device = token_ids.device
    query_lens = ends - starts
    query_start_loc = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(query_lens, out=query_start_loc[1:])
    token_rows = np.repeat(rows, query_lens)
    positions = np.arange(query_start_loc[-1]) + np.repeat(starts - query_start_loc[:-1], query_lens)
    index = to_device(token_rows * token_ids.shape[1] + positions, device)
    device_rows = to_device(rows, device)

    def group(table: RowTable) -> GroupInputs:
        size = table.block_size
        place = to_device(token_rows * table.table.shape[1] + positions // size, device)
        slots = table.table.view(-1).index_select(0, place).to(torch.int64)
        slots.mul_(size).add_(to_device(positions % size, device))
        return GroupInputs(_block_table(table, device_rows, starts, ends), slots)

    return StepInputs(
        input_ids=token_ids.view(-1).index_select(0, index).to(torch.int64),
        positions=to_device(positions, device),
        query_start_loc=to_device(query_start_loc.astype(np.int32), device),
        seq_lens=to_device(ends.astype(np.int32), device),
        groups=tuple(group(table) for table in tables),
    )


def _block_table(table: RowTable, rows: Tensor, starts: HostInts, ends: HostInts) -> Tensor:
    needed = -(-ends // table.block_size)
    first = np.zeros_like(needed)
    if table.sliding_window is not None:
        first = np.maximum(starts - table.sliding_window + 1, 0) // table.block_size
    blocks = table.table[:, : int(needed.max())].index_select(0, rows)
    place = np.arange(blocks.shape[1])
    outside = (place < first[:, None]) | (place >= needed[:, None])
    return blocks.masked_fill_(to_device(outside, blocks.device), 0)
