"""A decode step whose host work does not depend on the step: what graphs capture.

Everything that differs between steps of the same number of rows is read on the device. Knows rows, network and sampler;
does not know graphs.

Shape legend: P entries, some of which may be padding.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from quire_attention.batch import AttentionMetadata, ForwardBatch
from quire_ops import OpFunction
from quire_runner.rows import Rows
from quire_sampling import Sampler

__all__ = ["DecodeNetwork", "PaddedDecode"]


class DecodeNetwork(Protocol):
    """What is asked of a network here."""

    def forward(self, batch: ForwardBatch) -> Tensor: ...
    def compute_logits(self, hidden: Tensor) -> Tensor: ...
    def most_likely(self, hidden: Tensor) -> tuple[Tensor, Tensor]: ...


class PaddedDecode:
    """A `ComputeStep` (`graphs.py`).

    Args:
        network: The network.
        rows: Where its sequences are.
        decode_inputs: Op `decode_inputs`.
        sampler: Draws.
        layers: `group_of_layer`, `kv_caches` and `states` of the batches.
        longest: Tokens of the longest sequence that there may be.
    """

    def __init__(
        self,
        network: DecodeNetwork,
        rows: Rows,
        decode_inputs: OpFunction,
        sampler: Sampler,
        layers: tuple[tuple[int, ...], tuple[Tensor, ...], tuple[tuple[Tensor, ...], ...]],
        longest: int,
    ) -> None:
        self._network = network
        self._rows = rows
        self._decode_inputs = decode_inputs
        self._sampler = sampler
        self._layers = layers
        self._longest = longest

    def __call__(self, spans: Tensor, *, draws: bool) -> tuple[Tensor, Tensor]:
        """See `ComputeStep`."""
        batch = self._batch(spans)
        hidden = self._network.forward(batch)
        if draws:
            logits = self._network.compute_logits(hidden)
            token_ids, peaks = self._sampler.draw(logits, spans[0], batch.positions)
        else:
            token_ids, peaks = self._network.most_likely(hidden)
        rows = self._rows
        places = torch.add(spans[2], spans[0], alpha=rows.row_len)
        rows.token_ids.view(-1).index_copy_(0, places, token_ids.to(torch.int32))
        return token_ids, peaks

    def _batch(self, spans: Tensor) -> ForwardBatch:
        rows, size = self._rows, spans.shape[1]
        inputs = self._decode_inputs(rows.token_ids, rows.row_tables, spans)
        group_of_layer, kv_caches, states = self._layers
        return ForwardBatch(
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            attention=tuple(
                AttentionMetadata(
                    query_start_loc=inputs.query_start_loc,
                    seq_lens=inputs.seq_lens,
                    block_table=group.block_table,
                    slot_mapping=group.slot_mapping,
                    block_size=table.block_size,
                    query_lens=[1] * size,
                    kv_lens=[self._longest] * size,  # a bound
                )
                for group, table in zip(inputs.groups, rows.block_tables, strict=True)
            ),
            group_of_layer=group_of_layer,
            kv_caches=kv_caches,
            states=states,
        )
