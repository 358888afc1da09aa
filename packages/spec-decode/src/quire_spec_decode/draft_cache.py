"""The KV cache of a network that drafts: beside the target's, block for block, under the same block ids.

What holds the target's keys and values of some tokens holds the drafter's of the same tokens, so that prefixes,
preemption and eviction need nothing of their own. What of it was written is counted here, slot by slot: a drafter may
have left steps out, and blocks may have come from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire_attention.batch import ForwardBatch
from quire_interfaces.errors import ConfigError
from quire_interfaces.kv_cache import FullAttentionSpec, KVCacheGroup, KVCachePlan, KVCacheSpec, LatentAttentionSpec
from quire_interfaces.step import SchedulerOutput
from quire_models import Network
from quire_ops import OpFunction, PagedLayout, to_device
from quire_spec_decode.row_drafter import DraftRows

__all__ = ["AllocateKVCaches", "DraftCache", "RowSpan", "draft_group", "draft_specs"]


AllocateKVCaches = Callable[[KVCachePlan], dict[str, Tensor]]
"""Plan -> name of a layer -> its cache, on the drafting network's device and in its attention backend's shape."""


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Positions [start, end) of a row."""

    row: int
    start: int
    end: int


def draft_group(plan: KVCachePlan) -> int:
    """The group of the target whose blocks the drafter follows: one that keeps every token.

    Raises:
        ConfigError: there is none.
    """
    for index, group in enumerate(plan.groups):
        if type(group.spec) in (FullAttentionSpec, LatentAttentionSpec):
            return index
    raise ConfigError(
        "no layer of this model keeps keys and values of all tokens, so that a drafting network has no place for its "
        "own; use speculative method ngram or suffix, or medusa or mlp_speculator with heads for this model",
        field="speculative_method",
    )


def draft_specs(specs: dict[str, KVCacheSpec]) -> tuple[KVCacheSpec, tuple[str, ...]]:
    """What each layer of a drafting network keeps, windows or not, and the layers' names.

    Raises:
        ConfigError: they keep different things, or none keys and values.
    """
    kinds: set[KVCacheSpec] = set()
    for spec in specs.values():
        if isinstance(spec, LatentAttentionSpec):
            kinds.add(spec)
            continue
        if not isinstance(spec, FullAttentionSpec):
            raise ConfigError(
                "the draft model keeps recurrent states, and would have to go back to earlier ones after each guess; "
                "choose one whose every layer attends",
                field="speculative_model",
            )
        values = {name: getattr(spec, name) for name in ("block_size", "num_kv_heads", "head_dim", "dtype")}
        kinds.add(FullAttentionSpec(**values))
    if len(kinds) != 1:
        raise ConfigError("the layers of the draft model keep keys of different sizes", field="speculative_model")
    return kinds.pop(), tuple(specs)


class DraftCache:
    """Caches of a drafting network, and its passes over them.

    Args:
        network: The drafter.
        rows: The target's rows: tokens and block tables.
        plan: The target's KV cache.
        step_inputs: Op `step_inputs`.
        allocate: Allocates the caches.
    """

    def __init__(
        self,
        network: Network,
        rows: DraftRows,
        plan: KVCachePlan,
        step_inputs: OpFunction,
        allocate: AllocateKVCaches,
    ) -> None:
        self.group = draft_group(plan)
        block_size = plan.groups[self.group].spec.block_size
        spec, names = draft_specs(network.config.kv_cache_specs(block_size, network.cache_dtype))
        own = KVCachePlan(
            groups=(KVCacheGroup(spec=spec, layer_names=names),),
            num_blocks=plan.num_blocks,
            tensor_block_bytes=(spec.block_bytes,) * len(names),
        )
        caches = allocate(own)
        self.caches = tuple(caches[name] for name in names)
        self.group_of_layer = (0,) * len(names)
        self.block_size = block_size
        self._rows = rows
        self._step_inputs = step_inputs
        self._table = rows.block_tables[self.group]
        self._row_table = rows.row_tables[self.group]
        self._first: NDArray[np.int64] = np.zeros(len(rows.num_tokens), dtype=np.int64)
        """[R] block with which what the drafter sees of a row begins (`leave_out`)."""
        self._written: NDArray[np.int64] = np.zeros(plan.num_blocks, dtype=np.int64)
        """[num_blocks] leading slots of each block that hold the drafter's keys of the tokens that are there now."""

    def begin(self, output: SchedulerOutput) -> None:
        """Blocks were given to rows, or are about to be filled from elsewhere: nothing of theirs is written."""
        for new in output.new_rows:
            self._first[new.row] = 0
            self._forget(new.block_ids[self.group][new.num_computed_tokens // self.block_size :])
        for block_ids in output.new_block_ids.values():
            self._forget(block_ids[self.group])
        if output.kv_transfer is not None:
            for job in output.kv_transfer.loads:
                self._forget([block.block_id for block in job.blocks if block.key.group == self.group])

    def _forget(self, block_ids: Sequence[int]) -> None:
        if block_ids:
            self._written[block_ids] = 0

    def num_slots(self, row: int) -> int:
        """Tokens that the row's blocks have room for."""
        return int(self._table.num_blocks[row]) * self.block_size

    def num_written(self, row: int) -> int:
        """Leading tokens of the row whose keys are there, or were left out."""
        first = int(self._first[row])
        written = self._written[self._blocks(row, self.num_slots(row))[first:]]
        short = np.flatnonzero(written < self.block_size)
        if not len(short):
            return (first + len(written)) * self.block_size
        return (first + int(short[0])) * self.block_size + int(written[short[0]])

    def leave_out(self, row: int, start: int) -> bool:
        """Let the drafter see of a row only what follows the last keys that are missing before position `start`. The
        keys know their positions, so that nothing else changes. False where `start` is within a block: a context
        begins with one.
        """
        if start % self.block_size:
            return False
        written = self._written[self._blocks(row, start)]
        short = np.flatnonzero(written < self.block_size)
        self._first[row] = short[-1] + 1 if len(short) else 0
        return True

    def left_out(self, rows: Sequence[int]) -> NDArray[np.int64]:
        """[S] leading tokens of each row that the drafter does not see."""
        return self._first[list(rows)] * self.block_size

    def wrote(self, row: int, start: int, end: int) -> None:
        """Tokens [start, end) of the row have their keys now, and those behind them in the last block have not."""
        first = start // self.block_size
        block_ids = self._blocks(row, end)[first:]
        ends = np.arange(first, first + len(block_ids)) * self.block_size
        self._written[block_ids] = np.minimum(end - ends, self.block_size)

    def _blocks(self, row: int, num_tokens: int) -> NDArray[np.int64]:
        table = self._table.table[row, : -(-num_tokens // self.block_size)]
        return table.cpu().numpy().astype(np.int64)

    def batch(self, spans: Sequence[RowSpan]) -> ForwardBatch:
        """The inputs of a pass; `input_ids` are the tokens at the positions."""
        rows, starts, ends = (
            np.array(values, dtype=np.int64)
            for values in zip(*((span.row, span.start, span.end) for span in spans), strict=True)
        )
        inputs = self._step_inputs(self._rows.token_ids, (self._row_table,), rows, starts, ends)
        seq_lens, table, lens = inputs.seq_lens, inputs.groups[0].block_table, ends
        if self._first[rows].any():
            seq_lens, table = self._without(rows, seq_lens, table)
            lens = ends - self.left_out(rows.tolist())
        attention = PagedLayout(
            query_start_loc=inputs.query_start_loc,
            seq_lens=seq_lens,
            block_table=table,
            slot_mapping=inputs.groups[0].slot_mapping,
            block_size=self.block_size,
            query_lens=(ends - starts).tolist(),
            kv_lens=lens.tolist(),
        )
        return ForwardBatch(
            num_positions=int(ends.max()),
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            attention=(attention,),
            group_of_layer=self.group_of_layer,
            kv_caches=self.caches,
        )

    def _without(self, rows: NDArray[np.int64], seq_lens: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Lengths [S] and block tables [S, B] without the blocks that are left out."""
        places = np.arange(table.shape[1]) + self._first[rows][:, None]
        kept = np.where(places < table.shape[1], places, 0)
        moved = table.gather(1, to_device(kept, table.device))
        moved.masked_fill_(to_device(places >= table.shape[1], table.device), 0)
        return seq_lens - to_device(self.left_out(rows.tolist()).astype(np.int32), seq_lens.device), moved
