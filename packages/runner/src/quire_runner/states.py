"""States of recurrent layers in a step that verifies drafts: which tokens are right is known only behind it.

Until then the states of such sequences stay as they are before the step; afterwards the layers' ops run again over the
tokens that were right (`quire_ops.StateReplay`). For such a step it is said token by token where a state is read and
stored, as if blocks had one token: then the place that is read is none that is stored to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quire_attention.batch import ForwardBatch
from quire_ops import PagedLayout, StateReplay, to_device
from quire_runner.rows import BlockTable

__all__ = ["HeldStates", "Spans", "hold_states"]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Spans(NamedTuple):
    """Positions [start, end) of rows, [S] each."""

    rows: Ints
    starts: Ints
    ends: Ints

    def where(self, chosen: Bools) -> Spans:
        """Some of them."""
        return Spans(*(each[chosen] for each in self))


class HeldStates:
    """What the states of sequences with drafts can be made of.

    Args:
        spans: Their tokens of the step.
        replays: Per KV cache group that keeps states, its block table and what its ops were given.
    """

    def __init__(self, spans: Spans, replays: Sequence[tuple[BlockTable, StateReplay]]) -> None:
        self._spans = spans
        self._replays = replays

    def store(self, num_computed_tokens: Ints) -> None:
        """Store the states after the right tokens, and at the ends of blocks among them.

        Args:
            num_computed_tokens: Per row, its leading tokens that are right and computed; a row that is not beyond the
                step's start has failed and gets nothing.
        """
        rows, starts, ends = self._spans
        right = np.minimum(num_computed_tokens[rows], ends)
        alive = right > starts
        if not alive.any():
            return
        spans = Spans(rows, starts, right).where(alive)
        lens = ends - starts
        place = np.arange(lens.sum()) - np.repeat(np.cumsum(lens) - lens, lens)
        is_right = place < np.repeat(right - starts, lens)
        for table, replay in self._replays:
            kept = None if is_right.all() else to_device(np.flatnonzero(is_right), table.table.device)
            replay.run(kept, _by_token(spans, table, np.full(len(spans.rows), True)))


def hold_states(
    spans: Spans, is_verified: Bools, batch: ForwardBatch, tables: Sequence[BlockTable]
) -> HeldStates | None:
    """Keep the step from storing states of sequences with drafts.

    Args:
        spans: All sequences of the step.
        is_verified: [S] which of them have drafts that may be wrong.
        batch: Its groups that keep states get other metadata.
        tables: Per group.

    Returns:
        What stores them later; None where no sequence has such drafts.
    """
    if not is_verified.any():
        return None
    device = batch.positions.device
    tokens = to_device(np.flatnonzero(np.repeat(is_verified, spans.ends - spans.starts)), device)
    groups = {group for group, states in zip(batch.group_of_layer, batch.states, strict=True) if states}
    replays = []
    attention = list(batch.attention)
    for group in sorted(groups):
        attention[group] = _by_token(spans, tables[group], ~is_verified)
        replay = attention[group].replay = StateReplay(tokens)
        replays.append((tables[group], replay))
    batch.attention = tuple(attention)
    return HeldStates(spans.where(is_verified), replays)


def _by_token(spans: Spans, table: BlockTable, is_stored: Bools) -> PagedLayout:
    """The layout of tokens whose states are told apart one by one: of a sequence that goes on, place 0 of its table is
    the block of the state to go on from; then each token has a place, with the block that gets the state after it, or
    the null block.

    Args:
        is_stored: [S] whose states are stored at all: where blocks end, and after the last token.
    """
    rows, starts, ends = spans
    size, device = table.block_size, table.table.device
    lens, goes_on = ends - starts, (starts > 0).astype(np.int64)
    query_start_loc = np.concatenate(([0], np.cumsum(lens)))
    sequence = np.repeat(np.arange(len(rows)), lens)
    position = np.arange(query_start_loc[-1]) - (query_start_loc[:-1] - starts)[sequence]
    stores = is_stored[sequence] & (((position + 1) % size == 0) | (position + 1 == ends[sequence]))
    reading, storing = np.flatnonzero(goes_on), sequence[stores]
    places = (position + goes_on[sequence] - starts[sequence])[stores]
    which, column, block = (
        to_device(np.concatenate(both), device)
        for both in (
            (reading, storing),
            (np.zeros(len(reading), dtype=np.int64), places),
            (((starts - 1) // size)[reading], position[stores] // size),
        )
    )
    seq_lens = lens + goes_on
    block_table = torch.zeros(len(rows), int(seq_lens.max()), dtype=torch.int32, device=device)
    block_table[which, column] = table.table[to_device(rows, device)[which], block]
    return PagedLayout(
        query_start_loc=to_device(query_start_loc.astype(np.int32), device),
        seq_lens=to_device(seq_lens.astype(np.int32), device),
        block_table=block_table,
        slot_mapping=torch.zeros(int(query_start_loc[-1]), dtype=torch.int64, device=device),
        block_size=1,
        query_lens=lens.tolist(),
        kv_lens=seq_lens.tolist(),
    )
