"""Drafting with networks: a smaller model of the same vocabulary, or a head that reads the target's hidden states.

Each proposes the tokens that it takes for the most likely, one pass after another, all rows of a step together. What
the target will sample does not depend on it (see `accept_drafts`). Knows rows and passes; does not
know how networks are built, nor when drafting pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire_interfaces.errors import ConfigError
from quire_interfaces.kv_cache import KVCachePlan
from quire_interfaces.step import SchedulerOutput
from quire_models import Network
from quire_models.draft_heads.dflash import DFlashHead
from quire_models.draft_heads.eagle import EagleHead
from quire_models.draft_heads.head import DraftHead
from quire_models.draft_heads.medusa import MedusaHeads
from quire_models.draft_heads.mlp_speculator import MLPSpeculator
from quire_ops import DecodeRows, OpFunction, SampleTable
from quire_spec_decode.draft_cache import AllocateKVCaches, DraftCache, RowSpan
from quire_spec_decode.head_drafting import BlockDrafting, HeadDrafting, ParallelDrafting
from quire_spec_decode.medusa_drafting import MedusaDrafting
from quire_spec_decode.mlp_speculator_drafting import MLPSpeculatorDrafting
from quire_spec_decode.row_drafter import DraftLimits, DraftRows, DraftStep, RowDrafter
from quire_spec_decode.trees import Draft

__all__ = ["ModelDrafting", "network_drafting"]


def network_drafting(
    network: Network,
    target: Network,
    rows: DraftRows,
    plan: KVCachePlan,
    limits: DraftLimits,
    step_inputs: OpFunction,
    allocate: AllocateKVCaches,
) -> RowDrafter:
    """The drafter that runs a drafting network; a head is joined with its target first.

    Args:
        network: The drafting network.
        target: The network that it drafts for.
        rows: The target's rows.
        plan: The target's KV cache.
        limits: How large drafts may be.
        step_inputs: Op `step_inputs`.
        allocate: Allocates the drafting network's own KV caches.

    Raises:
        ConfigError: trees are to be drafted and a network cannot have its tokens in trees, or there is no place for the
            drafting network's keys and values.
    """
    if isinstance(network, MedusaHeads):
        _check_trees(limits, target)
        return MedusaDrafting(network, rows, limits)
    if isinstance(network, MLPSpeculator):
        return MLPSpeculatorDrafting(network, rows)
    cache = DraftCache(network, rows, plan, step_inputs, allocate)
    if isinstance(network, DFlashHead):
        return BlockDrafting(network, target, rows, cache, limits)
    if isinstance(network, EagleHead) and network.is_parallel:
        return ParallelDrafting(network, target, rows, cache, limits)
    if isinstance(network, DraftHead):
        _check_trees(limits, target, network)
        return HeadDrafting(network, target, rows, cache, limits)
    return ModelDrafting(network, rows, cache, limits.max_num_batched_tokens)


def _check_trees(limits: DraftLimits, *networks: Network) -> None:
    """Raises:
    ConfigError: trees are to be drafted, and a network cannot have its tokens in trees.
    """
    refusals = [reason for network in networks for reason in network.tree_refusals] if limits.topk > 1 else []
    if refusals:
        raise ConfigError(
            f"tokens cannot be verified in trees by {', '.join(dict.fromkeys(refusals))}; draft chains "
            "(--speculative-eagle-topk 1), or choose another attention backend",
            field="eagle_topk",
        )


@dataclass(slots=True)
class _Guess:
    """What a row was given last: drafts behind its first `num_tokens` tokens."""

    num_tokens: int
    drafts: list[int]


class ModelDrafting(RowDrafter):
    """A draft model (Leviathan et al. 2023, "Fast inference from transformers via speculative decoding").

    It reads what the target read, a step later; tokens that it has not read yet (a prefix that others computed, steps
    without drafting) it reads when it is asked next.
    """

    feature_layers: tuple[int, ...] = ()
    wants_hidden = False

    def __init__(self, network: Network, rows: DraftRows, cache: DraftCache, max_num_batched_tokens: int) -> None:
        self._network = network
        self._rows = rows
        self._cache = cache
        self._budget = max_num_batched_tokens
        self._guesses: dict[int, _Guess] = {}
        self._num_tokens = np.zeros_like(rows.num_tokens)
        table = rows.block_tables[cache.group]
        self._decode = network.bind_decode(
            DecodeRows(
                token_ids=rows.token_ids,
                num_tokens=self._num_tokens,
                tables=(rows.row_tables[cache.group],),
                num_blocks=(table.num_blocks,),
                group_of_layer=cache.group_of_layer,
                kv_caches=cache.caches,
                lora_slots=np.full(len(rows.num_tokens), -1, dtype=np.int32),
                position_deltas=np.zeros(len(rows.num_tokens), dtype=np.int64),
                sample_table=SampleTable.greedy(len(rows.num_tokens), network.config.vocab_size, rows.token_ids.device),
            )
        )

    def begin(self, output: SchedulerOutput) -> None:
        """Tell the cache which blocks rows got for this step."""
        for row in (*output.freed_rows, *(new.row for new in output.new_rows)):
            self._guesses.pop(row, None)
        self._cache.begin(output)

    def propose(self, step: DraftStep) -> dict[int, Draft]:
        """Row -> what the network guesses to follow, at most as deep as its limit and its blocks allow."""
        limits = {row: self._room(row, limit) for row, limit in step.limits.items()}
        limits = {row: limit for row, limit in limits.items() if limit > 0}
        hidden = self._read(step, limits)
        proposals: dict[int, list[int]] = {row: [] for row in limits}
        last = [RowSpan(row, 0, int(self._rows.num_tokens[row])) for row in limits]
        if last:
            self._extend(proposals, last, self._network.argmax(hidden)[0])
        while last := [
            RowSpan(entry.row, entry.end, entry.end + 1)
            for entry in last
            if len(proposals[entry.row]) < limits[entry.row]
        ]:
            self._extend(proposals, last, None)
        for row, drafts in proposals.items():
            self._guesses[row] = _Guess(int(self._rows.num_tokens[row]), drafts)
        return {row: Draft(drafts) for row, drafts in proposals.items()}

    def _room(self, row: int, limit: int) -> int:
        """As many drafts as the row's blocks allow: each but the last one is read."""
        num_tokens = int(self._rows.num_tokens[row])
        return min(limit, min(self._cache.num_slots(row), self._network.config.max_model_len) - num_tokens + 1)

    def _read(self, step: DraftStep, limits: dict[int, int]) -> Tensor:
        """Read what is known and new. Returns the states [N, H] behind the last token of each row of `limits`."""
        ends = {int(row): int(end) for row, end in zip(step.plan.rows, step.plan.ends, strict=True)}
        ends = {row: end for row, end in ends.items() if end < self._rows.num_tokens[row]}  # chunks of prompts
        ends |= {row: int(self._rows.num_tokens[row]) for row in limits}
        entries: list[RowSpan] = []
        states: dict[int, Tensor] = {}
        for row, end in ends.items():
            start = self._num_read(row)
            if row in limits:
                start = min(start, end - 1)
            entries += [RowSpan(row, at, min(at + self._budget, end)) for at in range(start, end, self._budget)]
        while entries:
            now = _take(entries, self._budget)
            batch = self._cache.batch(now)
            # The target's embedding may be padded beyond this network's, and prompts may hold such ids.
            batch.input_ids = batch.input_ids.clamp(max=self._network.config.vocab_size - 1)
            hidden = self._network.forward(batch)
            position = -1
            for entry in now:
                position += entry.end - entry.start
                states[entry.row] = hidden[position]
                self._cache.wrote(entry.row, entry.start, entry.end)
        return torch.stack([states[row] for row in limits]) if limits else torch.empty(0)

    def _num_read(self, row: int) -> int:
        """Known tokens that were read; drafts that were read and came true are among them."""
        guess = self._guesses.pop(row, None)
        if guess is not None and len(guess.drafts) > 1:
            start, end = guess.num_tokens, guess.num_tokens + len(guess.drafts) - 1
            end = min(end, int(self._rows.num_tokens[row]))
            came: list[int] = self._rows.token_ids[row, start:end].tolist()
            right = next((i for i, token in enumerate(came) if token != guess.drafts[i]), len(came))
            if right and self._cache.num_written(row) == start:
                self._cache.wrote(row, start, start + right)
        return self._cache.num_written(row)

    def _extend(self, proposals: dict[int, list[int]], entries: list[RowSpan], token_ids: Tensor | None) -> None:
        """One more guess behind the end of each entry; without `token_ids` by a pass over it."""
        if token_ids is None:
            found = self._decode_step(entries)
            if found is not None:
                for entry, token in zip(entries, found, strict=True):
                    proposals[entry.row].append(token)
                return
            token_ids = self._network.argmax(self._network.forward(self._cache.batch(entries)))[0]
        _write(self._rows, entries, token_ids)
        for entry, token in zip(entries, token_ids.tolist(), strict=True):
            proposals[entry.row].append(token)

    def _decode_step(self, entries: list[RowSpan]) -> list[int] | None:
        if self._decode is None:
            return None
        which = [entry.row for entry in entries]
        self._num_tokens[which] = [entry.end for entry in entries]
        return self._decode(which, [entry.start for entry in entries])


def _take(entries: list[RowSpan], budget: int) -> list[RowSpan]:
    """Remove from the front what one pass computes: at most `budget` tokens, a row once."""
    taken: list[RowSpan] = []
    rows: set[int] = set()
    while entries and entries[0].row not in rows and entries[0].end - entries[0].start <= budget:
        taken.append(entries.pop(0))
        rows.add(taken[-1].row)
        budget -= taken[-1].end - taken[-1].start
    return taken


def _write(rows: DraftRows, entries: Sequence[RowSpan], token_ids: Tensor) -> None:
    """Put guesses behind the ends of entries, where the next pass gathers them."""
    which, ends = (np.array(values, dtype=np.int64) for values in zip(*((e.row, e.end) for e in entries), strict=True))
    rows.write_next(which, ends - 1, token_ids)
