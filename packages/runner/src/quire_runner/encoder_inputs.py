"""What networks with an encoder get in addition: the inputs that their encoder reads in a step, and where cross
attention finds what encoders have read.

Shape legend: T tokens of the step (the decoder's), E tokens that encoders read in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_attention.batch import EncoderBatch
from quire_interfaces.step import NewRow
from quire_ops import PagedLayout, to_device
from quire_runner.media_arrays import read_arrays
from quire_runner.rows import Rows

__all__ = ["cross_attention", "encoder_batch", "encoder_slots", "reading_rows", "sound_features"]


def reading_rows(new_rows: Sequence[NewRow], rows: Rows) -> list[NewRow]:
    """Those whose encoder has something to read in their first step."""
    return [new for new in new_rows if new.encoder_token_ids and new.row not in rows.failed]


def encoder_slots(new_rows: Sequence[NewRow], rows: Rows, lens: Sequence[int]) -> NDArray[np.int32]:
    """[E] the adapter slot of each token that the encoders of new rows read, -1 for none; `lens` as in their batch."""
    return np.repeat(rows.lora_slots[[new.row for new in reading_rows(new_rows, rows)]], lens)


def encoder_batch(reading: Sequence[NewRow], device: torch.device) -> EncoderBatch:
    """The inputs of new rows, at least one, one behind the other."""
    lens = [len(new.encoder_token_ids) for new in reading]
    token_ids = np.array([token for new in reading for token in new.encoder_token_ids], dtype=np.int64)
    positions = np.concatenate([np.arange(length) for length in lens])
    return EncoderBatch(
        input_ids=to_device(token_ids, device),
        positions=to_device(positions, device),
        lens=lens,
        features=sound_features(reading, device),
    )


def sound_features(rows: Sequence[NewRow], device: torch.device) -> tuple[Tensor, ...]:
    """What an encoder reads in place of the tokens of prompts: the arrays of their media, where no token stands for
    these."""
    return tuple(
        features.to(device)
        for row in rows
        for span in (() if row.media is None else row.media.spans)
        if not span.length
        for features in read_arrays(span.item).values()
    )


def cross_attention(rows: Rows, token_rows: NDArray[np.int64], reading: Sequence[NewRow]) -> tuple[PagedLayout, ...]:
    """Per cross-attention group, its metadata (see `PagedLayout`).

    Args:
        rows: Tables, and how much encoders have read.
        token_rows: [T] row of each token of the step.
        reading: Rows whose encoder reads in this step, in the order of the encoder's batch.
    """
    device = rows.token_ids.device
    lens = rows.encoder_lens[token_rows]
    starts = to_device(np.arange(len(token_rows) + 1, dtype=np.int32), device)
    seq_lens, index = to_device(lens.astype(np.int32), device), to_device(token_rows, device)
    found = []
    for group, table in enumerate(rows.encoder_tables, len(rows.row_tables)):
        num_blocks = -(-int(lens.max()) // table.block_size)
        found.append(
            PagedLayout(
                query_start_loc=starts,
                seq_lens=seq_lens,
                block_table=table.table[:, :num_blocks].index_select(0, index),
                slot_mapping=to_device(_slots(reading, group, table.block_size), device),
                block_size=table.block_size,
                query_lens=[1] * len(token_rows),
                kv_lens=lens.tolist(),
            )
        )
    return tuple(found)


def _slots(reading: Sequence[NewRow], group: int, block_size: int) -> NDArray[np.int64]:
    """[E] where the keys and values of what encoders read go."""
    parts = [np.empty(0, dtype=np.int64)]
    for new in reading:
        position = np.arange(len(new.encoder_token_ids))
        parts.append(np.array(new.block_ids[group])[position // block_size] * block_size + position % block_size)
    return np.concatenate(parts)
