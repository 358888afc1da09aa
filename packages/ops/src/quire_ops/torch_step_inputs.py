"""The torch backend of op `step_inputs`. No loop over tokens.

Index arithmetic happens on the host, from numbers that are known there (numpy); everything that depends on token ids or
block ids is gathered on the device, so that a token sampled a moment ago is found without a round trip.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire_ops.staging import to_device
from quire_ops.step_inputs import GroupInputs, HostInts, RowTable, StepInputs

__all__ = ["decode_inputs", "step_inputs"]


def decode_inputs(token_ids: Tensor, tables: tuple[RowTable, ...], spans: Tensor) -> StepInputs:
    """Op `decode_inputs`. Sends nothing from the host, and asks nothing of the device."""
    rows, starts, ends, firsts = spans

    def group(table: RowTable) -> GroupInputs:
        size = table.block_size
        blocks, here = table.table.index_select(0, rows), (starts // size)[:, None]
        slots = blocks.gather(1, here).squeeze(1).to(torch.int64).mul_(size).add_(starts % size)
        place = torch.arange(blocks.shape[1], device=spans.device)
        outside = place > here
        if table.sliding_window is not None:
            outside |= (
                place < (starts - table.sliding_window + 1).clamp_min_(0).div_(size, rounding_mode="floor")[:, None]
            )
        return GroupInputs(blocks.masked_fill_(outside, 0), slots)

    return StepInputs(
        input_ids=token_ids.view(-1).index_select(0, rows * token_ids.shape[1] + starts).to(torch.int64),
        positions=starts,
        query_start_loc=torch.cat((firsts, firsts[-1:] + 1)).to(torch.int32),
        seq_lens=ends.to(torch.int32),
        groups=tuple(group(table) for table in tables),
    )


def step_inputs(
    token_ids: Tensor, tables: tuple[RowTable, ...], rows: HostInts, starts: HostInts, ends: HostInts
) -> StepInputs:
    """Op `step_inputs`."""
    device = token_ids.device
    query_lens = ends - starts
    query_start_loc = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(query_lens, out=query_start_loc[1:])
    token_rows = np.repeat(rows, query_lens)
    positions = np.arange(query_start_loc[-1]) + np.repeat(starts - query_start_loc[:-1], query_lens)
    index = to_device(token_rows * token_ids.shape[1] + positions, device)
    entry_rows = to_device(rows, device)

    def group(table: RowTable) -> GroupInputs:
        size = table.block_size
        place = to_device(token_rows * table.table.shape[1] + positions // size, device)
        slots = table.table.view(-1).index_select(0, place).to(torch.int64)
        slots.mul_(size).add_(to_device(positions % size, device))
        return GroupInputs(_block_table(table, entry_rows, starts, ends), slots)

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
