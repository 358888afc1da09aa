"""Derives the inputs of a step from the rows and the scheduler's numbers. No loop over tokens, one sort of index work.

Index arithmetic happens on the host, from numbers the scheduler sent (numpy); everything that depends on token ids or
block ids is gathered on the device, so that a token sampled a moment ago is found without a round trip.

Shape legend: T tokens, S entries (sequences), N logit rows of this step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_attention.batch import AttentionMetadata, ForwardBatch
from quire_interfaces.step import SchedulerOutput
from quire_runner.rows import BlockTable, Rows

__all__ = ["HostPlan", "LogitRows", "forward_batch", "plan_step", "to_device", "write_drafts"]

Ints = NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class LogitRows:
    """The positions whose next token is sampled: per sampling entry its last known token, then each draft; only the
    last draft where drafts are certain."""

    rows: Ints
    """[N] row of each."""
    positions: Ints
    """[N] position in its sequence of the token whose successor is sampled."""
    token_index: Ints
    """[N] index among the step's tokens."""
    entry_ends: list[int]
    """Per entry: end of its logit rows, they begin where the entry before ends."""


@dataclass(slots=True, kw_only=True)
class HostPlan:
    """A step in host numbers."""

    rows: Ints
    """[S]"""
    start: Ints
    """[S] position of the first token."""
    query_lens: Ints
    """[S]"""
    ends: Ints
    """[S] position after the last token: the sequence's length once the step has run."""
    query_start_loc: Ints
    """[S + 1]"""
    token_rows: Ints
    """[T] row of each token."""
    positions: Ints
    """[T] position of each token."""
    num_drafts: Ints | None
    """[S] draft tokens, None when no entry has any."""
    logits: LogitRows


def plan_step(output: SchedulerOutput, rows: Rows) -> HostPlan:
    """Lay out the step's tokens.

    Raises:
        RuntimeError: the scheduler asks for tokens that no step has produced (a step before this one failed).
    """
    entry_rows = np.asarray(output.rows, dtype=np.int64)
    start = np.asarray(output.num_computed_tokens, dtype=np.int64)
    query_lens = np.asarray(output.num_scheduled_tokens, dtype=np.int64)
    ends = start + query_lens
    query_start_loc = np.zeros(len(entry_rows) + 1, dtype=np.int64)
    np.cumsum(query_lens, out=query_start_loc[1:])
    num_tokens = int(query_start_loc[-1])
    if num_tokens == len(entry_rows):
        token_rows, positions = entry_rows, start
    else:
        token_rows = np.repeat(entry_rows, query_lens)
        positions = np.arange(num_tokens) + np.repeat(start - query_start_loc[:-1], query_lens)
    num_drafts = None
    if output.draft_token_ids:
        drafts = output.draft_token_ids
        num_drafts = np.asarray([len(drafts.get(row, ())) for row in output.rows], dtype=np.int64)
    known = ends if num_drafts is None else ends - num_drafts
    unknown = known > rows.num_tokens[entry_rows]
    if unknown.any():
        i = int(unknown.argmax())
        raise RuntimeError(
            f"step {output.step_id} needs {known[i]} known tokens in row {output.rows[i]} (request "
            f"{output.request_ids[i]!r}), which has {rows.num_tokens[output.rows[i]]}: a step before it failed"
        )
    return HostPlan(
        rows=entry_rows,
        start=start,
        query_lens=query_lens,
        ends=ends,
        query_start_loc=query_start_loc,
        token_rows=token_rows,
        positions=positions,
        num_drafts=num_drafts,
        logits=_logit_rows(output, entry_rows, ends, query_start_loc, _num_verified(output, rows, num_drafts)),
    )


def _num_verified(output: SchedulerOutput, rows: Rows, num_drafts: Ints | None) -> Ints | None:
    """[S] drafts whose logits are needed: not those of drafts that are certain, unless their log probabilities are
    asked for."""
    if num_drafts is None or not output.forced_rows:
        return num_drafts
    taken = [row in output.forced_rows and row not in rows.sampling.num_logprobs for row in output.rows]
    return np.where(taken, 0, num_drafts)


def _logit_rows(
    output: SchedulerOutput, rows: Ints, ends: Ints, query_start_loc: Ints, num_drafts: Ints | None
) -> LogitRows:
    samples = np.asarray(output.samples, dtype=np.int64)
    if num_drafts is None:
        counts = samples
        entries = np.flatnonzero(samples)
        back: Ints | int = 1
    else:
        counts = samples * (1 + num_drafts)
        entries = np.repeat(np.arange(len(rows)), counts)
        # Distance from the entry's end: 1 + drafts for the last known token, down to 1 for the last draft.
        first = np.repeat(np.cumsum(counts) - counts, counts)
        back = np.repeat(counts, counts) - (np.arange(len(entries)) - first)
    return LogitRows(
        rows=rows[entries],
        positions=ends[entries] - back,
        token_index=query_start_loc[1:][entries] - back,
        entry_ends=np.cumsum(counts).tolist(),
    )


def write_drafts(output: SchedulerOutput, plan: HostPlan, rows: Rows) -> None:
    """Put the draft tokens behind the last known token of their rows, where the step's inputs are gathered."""
    places: list[int] = []
    values: list[int] = []
    for row, end in zip(output.rows, plan.ends.tolist(), strict=True):
        drafts = output.draft_token_ids.get(row)
        if drafts:
            places.extend(range(row * rows.row_len + end - len(drafts), row * rows.row_len + end))
            values.extend(drafts)
    if places:
        index = to_device(np.asarray(places, dtype=np.int64), rows.token_ids.device)
        rows.token_ids.view(-1)[index] = to_device(np.asarray(values, dtype=np.int32), rows.token_ids.device)


def forward_batch(
    plan: HostPlan,
    rows: Rows,
    group_of_layer: tuple[int, ...],
    kv_caches: tuple[Tensor, ...],
    states: tuple[tuple[Tensor, ...], ...] = (),
) -> ForwardBatch:
    """Gather what the network gets; the last three arguments are handed on.

    Raises:
        RuntimeError: a row has fewer blocks than the step's tokens need (a bug of the scheduler's side).
    """
    device = rows.token_ids.device
    index = to_device(plan.token_rows * rows.row_len + plan.positions, device)
    shared = _Shared(
        rows=to_device(plan.rows, device),
        query_start_loc=to_device(plan.query_start_loc.astype(np.int32), device),
        seq_lens=to_device(plan.ends.astype(np.int32), device),
        query_lens=plan.query_lens.tolist(),
        kv_lens=plan.ends.tolist(),
    )
    return ForwardBatch(
        input_ids=rows.token_ids.view(-1).index_select(0, index).to(torch.int64),
        positions=to_device(plan.positions, device),
        attention=tuple(_attention_metadata(plan, table, shared) for table in rows.block_tables),
        group_of_layer=group_of_layer,
        kv_caches=kv_caches,
        states=states,
    )


class _Shared(NamedTuple):
    """What all groups' metadata have in common."""

    rows: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    query_lens: list[int]
    kv_lens: list[int]


def _attention_metadata(plan: HostPlan, table: BlockTable, shared: _Shared) -> AttentionMetadata:
    device, size = table.table.device, table.block_size
    needed = -(-plan.ends // size)
    held = table.num_blocks[plan.rows]
    if (needed > held).any():
        i = int((needed > held).argmax())
        raise RuntimeError(f"row {plan.rows[i]} needs {needed[i]} blocks but was given {held[i]}")
    index = to_device(plan.token_rows * table.width + plan.positions // size, device)
    slots = table.table.view(-1).index_select(0, index).to(torch.int64)
    slots.mul_(size).add_(to_device(plan.positions % size, device))
    return AttentionMetadata(
        query_start_loc=shared.query_start_loc,
        seq_lens=shared.seq_lens,
        block_table=_block_table(plan, table, shared.rows, needed, held),
        slot_mapping=slots,
        block_size=size,
        query_lens=shared.query_lens,
        kv_lens=shared.kv_lens,
    )


def _block_table(plan: HostPlan, table: BlockTable, rows: Tensor, needed: Ints, held: Ints) -> Tensor:
    """[S, B] int32: the rows' tables, with the null block wherever a kernel must not look."""
    width = int(needed.max())
    blocks = table.table[:, :width].index_select(0, rows)
    first = np.zeros_like(needed)
    if table.sliding_window is not None:
        # Blocks before the window may already belong to another request.
        first = np.maximum(plan.start - table.sliding_window + 1, 0) // table.block_size
    beyond = np.minimum(held, width) > needed
    if beyond.any() or first.any():
        place = np.arange(width)
        outside = (place < first[:, None]) | (place >= needed[:, None])
        blocks.masked_fill_(to_device(outside, blocks.device), 0)
    return blocks


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array as a tensor on `device`; shares memory on the CPU."""
    return torch.from_numpy(array).to(device)
