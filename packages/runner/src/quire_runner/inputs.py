"""Derives the inputs of a step from the rows and the scheduler's numbers.

Index arithmetic that the host needs itself happens here, on numbers that the scheduler sent (numpy); everything that
depends on token ids or block ids is gathered on the device by op `step_inputs`, so that a token sampled a moment ago is
found without a round trip.

Shape legend: T tokens, S entries (sequences), N logit rows of this step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire_attention.batch import ForwardBatch
from quire_interfaces.step import NewRow, SchedulerOutput
from quire_ops import OpFunction, PagedLayout, StepInputs, to_device
from quire_runner.encoder_inputs import cross_attention, encoder_batch, reading_rows
from quire_runner.rows import Rows
from quire_runner.states import HeldStates, Spans, hold_states
from quire_spec_decode import depths, paths

__all__ = ["HostPlan", "Layers", "LogitRows", "forward_batch", "make_batch", "plan_step", "write_drafts"]

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
    ends: Ints
    """[S] position after the last token: the sequence's length once the step has run."""
    query_lens: list[int]
    """Per entry."""
    query_start_loc: Ints
    """[S + 1]"""
    num_drafts: Ints | None
    """[S] draft tokens, None when no entry has any."""
    trees: dict[int, list[int]]
    """Entry -> what each of its draft tokens follows, where they are a tree (`SchedulerOutput.draft_parents`)."""
    logits: LogitRows
    kept: dict[int, list[int]] = field(default_factory=dict)
    """Row with a tree -> which of its tokens of the step are known to be right, the first one (0) among them. Filled
    when they are verified."""
    held: HeldStates | None = None
    """The states of sequences with drafts, where layers keep states: not stored until the drafts are verified."""

    @property
    def is_verified(self) -> NDArray[np.bool_]:
        """[S] whether tokens of the entry may turn out wrong: drafts whose logits are in the step."""
        return np.diff(self.logits.entry_ends, prepend=0) > 1


def plan_step(output: SchedulerOutput, rows: Rows) -> HostPlan:
    """Lay out the step's tokens.

    Raises:
        RuntimeError: the scheduler asks for tokens that no step has produced (a step before this one failed).
    """
    entry_rows = np.array(output.rows, dtype=np.int64)
    start = np.array(output.num_computed_tokens, dtype=np.int64)
    if sum(output.num_scheduled_tokens) == len(entry_rows) and all(output.samples):
        return _plan_decodes(output, rows, entry_rows, start)
    query_lens = np.array(output.num_scheduled_tokens, dtype=np.int64)
    ends = start + query_lens
    query_start_loc = np.zeros(len(entry_rows) + 1, dtype=np.int64)
    np.cumsum(query_lens, out=query_start_loc[1:])
    num_drafts = None
    if output.draft_token_ids:
        drafts = output.draft_token_ids
        num_drafts = np.array([len(drafts.get(row, ())) for row in output.rows], dtype=np.int64)
    _check_known(output, rows, entry_rows, ends if num_drafts is None else ends - num_drafts)
    logits = _logit_rows(output, entry_rows, ends, query_start_loc, _num_verified(output, rows, num_drafts))
    parents = output.draft_parents
    trees = {entry: parents[row] for entry, row in enumerate(output.rows) if row in parents} if parents else {}
    for entry, of_entry in trees.items():
        end = logits.entry_ends[entry]
        logits.positions[end - len(of_entry) : end] = start[entry] + np.array(depths(of_entry))
    return HostPlan(
        rows=entry_rows,
        start=start,
        ends=ends,
        query_lens=output.num_scheduled_tokens,
        query_start_loc=query_start_loc,
        num_drafts=num_drafts,
        trees=trees,
        logits=logits,
    )


def _plan_decodes(output: SchedulerOutput, rows: Rows, entry_rows: Ints, start: Ints) -> HostPlan:
    """The step of every day: each entry computes its last known token and samples the next one."""
    ends = start + 1
    _check_known(output, rows, entry_rows, ends)
    query_start_loc = np.arange(len(entry_rows) + 1)
    return HostPlan(
        rows=entry_rows,
        start=start,
        ends=ends,
        query_lens=output.num_scheduled_tokens,
        query_start_loc=query_start_loc,
        num_drafts=None,
        trees={},
        logits=LogitRows(
            rows=entry_rows,
            positions=start,
            token_index=query_start_loc[:-1],
            entry_ends=list(range(1, len(entry_rows) + 1)),
        ),
    )


def _check_known(output: SchedulerOutput, rows: Rows, entry_rows: Ints, known: Ints) -> None:
    unknown = known > rows.num_tokens[entry_rows]
    if unknown.any():
        i = int(unknown.argmax())
        raise RuntimeError(
            f"step {output.step_id} needs {known[i]} known tokens in row {output.rows[i]} (request "
            f"{output.request_ids[i]!r}), which has {rows.num_tokens[output.rows[i]]}: a step before it failed"
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
    step_inputs: OpFunction,
    layers: Layers,
    new_rows: Sequence[NewRow] = (),
) -> ForwardBatch:
    """Gather what the network gets.

    Args:
        plan: The step.
        rows: Its rows.
        step_inputs: Op `step_inputs`.
        layers: What every batch of the runner has.
        new_rows: Rows of this step that are new; their encoders may have something to read.

    Raises:
        RuntimeError: a row has fewer blocks than the step's tokens need (a bug of the scheduler's side).
    """
    rows.check(plan.rows, plan.ends)
    inputs = step_inputs(rows.token_ids, rows.row_tables, plan.rows, plan.start, plan.ends)
    batch = make_batch(inputs, rows, layers, plan.query_lens, plan.ends.tolist())
    if plan.trees:
        _put_trees(plan, batch)
    if layers.states and plan.num_drafts is not None:
        spans = Spans(plan.rows, plan.start, plan.ends)
        plan.held = hold_states(spans, plan.is_verified, batch, rows.block_tables)
    if rows.encoder_tables:
        reading = reading_rows(new_rows, rows)
        batch.encoder = encoder_batch(reading, rows.token_ids.device) if reading else None
        batch.attention += cross_attention(rows, np.repeat(plan.rows, plan.query_lens), reading)
    return batch


def _put_trees(plan: HostPlan, batch: ForwardBatch) -> None:
    """Tell the batch where the tokens of trees are: each entry's last known token is the root of its tree."""
    width = 3 + max(max(depths(parents)) for parents in plan.trees.values())
    table = np.full((int(plan.query_start_loc[-1]), width), -1, dtype=np.int32)
    for entry, parents in plan.trees.items():
        begin, root = int(plan.query_start_loc[entry]), int(plan.start[entry])
        table[begin, :3] = root
        for token, path in enumerate(paths(parents), begin + 1):
            table[token, 0] = root + len(path)
            table[token, 1:3] = root
            table[token, 3 : 3 + len(path)] = root + 1 + np.array(path)
    tokens = np.flatnonzero(table[:, 0] >= 0)
    device = batch.positions.device
    batch.positions[to_device(tokens, device)] = to_device(table[tokens, 0].astype(np.int64), device)
    places = to_device(table, device)
    for attention in batch.attention:
        attention.paths = places


class Layers(NamedTuple):
    """What every batch of a runner has: see `ForwardBatch`."""

    group_of_layer: tuple[int, ...]
    kv_caches: tuple[Tensor, ...]
    states: tuple[tuple[Tensor, ...], ...] = ()


def make_batch(
    inputs: StepInputs, rows: Rows, layers: Layers, query_lens: list[int], kv_lens: list[int]
) -> ForwardBatch:
    """A batch from what op `step_inputs` or `decode_inputs` gathered; the lists are those of its metadata."""
    return ForwardBatch(
        input_ids=inputs.input_ids,
        positions=inputs.positions,
        attention=tuple(
            PagedLayout(
                query_start_loc=inputs.query_start_loc,
                seq_lens=inputs.seq_lens,
                block_table=group.block_table,
                slot_mapping=group.slot_mapping,
                block_size=table.block_size,
                query_lens=query_lens,
                kv_lens=kv_lens,
            )
            for group, table in zip(inputs.groups, rows.row_tables, strict=True)
        ),
        group_of_layer=layers.group_of_layer,
        kv_caches=layers.kv_caches,
        states=layers.states,
    )
