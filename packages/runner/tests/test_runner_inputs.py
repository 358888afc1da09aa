"""Step inputs against a slow loop over tokens, for random rows and steps."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_interfaces import FullAttentionSpec, KVCacheGroup, NewRow, SamplingParams, SchedulerOutput, SlidingWindowSpec
from quire_ops import OpFunction, OpRequest, op_table, ops
from quire_runner import Rows, RunnerConfig
from quire_runner.grammars import RowGrammars
from quire_runner.inputs import Layers, forward_batch, plan_step, write_drafts
from quire_sampling import SamplingState

NUM_ROWS, MAX_LEN, NUM_DRAFTS = 6, 40, 3


@dataclass
class Entry:
    row: int
    tokens: list[int]
    start: int
    num: int
    drafts: list[int]
    samples: bool


def random_entries(rng: random.Random) -> list[Entry]:
    entries = []
    for row in rng.sample(range(NUM_ROWS), rng.randint(1, NUM_ROWS)):
        tokens = [rng.randrange(100) for _ in range(rng.randint(1, MAX_LEN))]
        start = rng.randrange(len(tokens))
        num = rng.randint(1, len(tokens) - start)
        samples = start + num == len(tokens)
        drafts = (
            [rng.randrange(100) for _ in range(rng.randint(0, NUM_DRAFTS))] if samples and rng.random() < 0.5 else []
        )
        entries.append(Entry(row, tokens, start, num + len(drafts), drafts, samples))
    return entries


def make_rows(group_sizes: tuple[int, int]) -> Rows:
    shape = {"num_kv_heads": 1, "head_dim": 1, "dtype": "float32"}
    groups = (
        KVCacheGroup(spec=FullAttentionSpec(block_size=group_sizes[0], **shape), layer_names=("a",)),
        KVCacheGroup(spec=SlidingWindowSpec(block_size=group_sizes[1], sliding_window=5, **shape), layer_names=("b",)),
    )
    config = RunnerConfig(max_num_seqs=NUM_ROWS, max_model_len=MAX_LEN, num_speculative_tokens=NUM_DRAFTS)
    device = torch.device("cpu")
    return Rows(config, groups, SamplingState(NUM_ROWS, 100), RowGrammars(None, 100, device), device)


def fill(rows: Rows, entries: list[Entry], rng: random.Random) -> SchedulerOutput:
    """Fill the rows in two steps: some blocks at first, the rest appended. Some blocks are held beyond the step."""
    sizes = [table.block_size for table in rows.block_tables]
    output = SchedulerOutput(
        step_id=7,
        rows=[e.row for e in entries],
        request_ids=[f"r{e.row}" for e in entries],
        num_computed_tokens=[e.start for e in entries],
        num_scheduled_tokens=[e.num for e in entries],
        samples=[e.samples for e in entries],
        draft_token_ids={e.row: e.drafts for e in entries if e.drafts},
    )
    free_blocks = list(range(1, 1000))
    rng.shuffle(free_blocks)
    first: list[NewRow] = []
    later: dict[int, tuple[list[int], ...]] = {}
    for e in entries:
        spare = rng.randint(0, 2)
        counts = [min(-(-(e.start + e.num) // size) + spare, -(-rows.row_len // size)) for size in sizes]
        blocks = [[free_blocks.pop() for _ in range(count)] for count in counts]
        cuts = [rng.randint(0, count) for count in counts]
        head = tuple(ids[:cut] for ids, cut in zip(blocks, cuts, strict=True))
        first.append(
            NewRow(
                row=e.row,
                request_id=f"r{e.row}",
                token_ids=e.tokens,
                num_prompt_tokens=1,
                num_computed_tokens=0,
                block_ids=head,
                sampling_params=SamplingParams(),
                seed=0,
            )
        )
        later[e.row] = tuple(ids[cut:] for ids, cut in zip(blocks, cuts, strict=True))
    empty = {"rows": [], "request_ids": [], "num_computed_tokens": [], "num_scheduled_tokens": [], "samples": []}
    rows.apply(SchedulerOutput(step_id=5, new_rows=first, **empty))
    rows.apply(SchedulerOutput(step_id=6, new_block_ids=later, **empty))
    assert rows.failed == {}
    return output


STEP_INPUTS = [
    backend.function for backend in op_table().backends(ops.step_inputs) if backend.refusal(OpRequest()) is None
]


@pytest.mark.parametrize("step_inputs", STEP_INPUTS)
@given(seed=st.integers(0, 2**32), sizes=st.tuples(st.sampled_from([1, 2, 8]), st.sampled_from([1, 4, 16])))
@settings(max_examples=150, deadline=None)
def test_inputs_equal_a_loop_over_tokens(step_inputs: OpFunction, seed: int, sizes: tuple[int, int]) -> None:
    rng = random.Random(seed)
    rows = make_rows(sizes)
    # Rows were used before: what is left of it must not be seen.
    fill(rows, random_entries(rng), rng)
    for row in range(NUM_ROWS):
        rows.free(row)
    entries = random_entries(rng)
    output = fill(rows, entries, rng)
    plan = plan_step(output, rows)
    if plan.num_drafts is not None:
        write_drafts(output, plan, rows)
    batch = forward_batch(plan, rows, step_inputs, Layers((0, 1), ()))

    known = {e.row: e.tokens + e.drafts for e in entries}
    tokens = [(e.row, p) for e in entries for p in range(e.start, e.start + e.num)]
    assert batch.input_ids.tolist() == [known[row][p] for row, p in tokens]
    assert batch.positions.tolist() == [p for _, p in tokens]
    assert batch.input_ids.dtype == batch.positions.dtype == torch.int64
    for metadata, table in zip(batch.attention, rows.block_tables, strict=True):
        size, window = metadata.block_size, table.sliding_window
        assert metadata.query_lens == [e.num for e in entries]
        assert metadata.kv_lens == metadata.seq_lens.tolist() == [e.start + e.num for e in entries]
        assert metadata.query_start_loc.tolist() == [0, *np.cumsum([e.num for e in entries]).tolist()]
        assert metadata.block_table.dtype == metadata.query_start_loc.dtype == torch.int32
        blocks = {e.row: table.table[e.row].tolist() for e in entries}
        assert metadata.slot_mapping.tolist() == [blocks[row][p // size] * size + p % size for row, p in tokens]
        for e, found in zip(entries, metadata.block_table.tolist(), strict=True):
            first = 0 if window is None else max(e.start - window + 1, 0) // size
            needed = -(-(e.start + e.num) // size)
            assert found[first:needed] == blocks[e.row][first:needed]
            assert not any(found[:first])
            assert not any(found[needed:])
            assert all(blocks[e.row][:needed])

    logits = [(e.row, p) for e in entries if e.samples for p in range(len(e.tokens) - 1, e.start + e.num)]
    assert list(zip(plan.logits.rows.tolist(), plan.logits.positions.tolist(), strict=True)) == logits
    assert [tokens[i] for i in plan.logits.token_index.tolist()] == logits
    ends = np.cumsum([(1 + len(e.drafts)) * e.samples for e in entries]).tolist()
    assert plan.logits.entry_ends == ends
