"""Recurrent ops of a step with drafts: nothing is stored until it is known which tokens were right."""

from __future__ import annotations

import inspect
import random
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ops_layouts import Layout
from ops_recurrent_cases import CASES, Steps, close

from quire_ops import OpBackend, StateReplay, op_table, ops, replayable

BACKENDS = [
    backend for op in ops.OPS if op.token_args for backend in op_table().backends(op) if backend.unavailable is None
]


@dataclass
class Recording(Layout):
    replay: StateReplay | None = None


def layout(table: list[list[int]], starts: list[int], lens: list[int], replay: StateReplay | None = None) -> Recording:
    """Tokens one by one: see `quire_ops.recurrent` for blocks of one token."""
    total = [0]
    for length in lens:
        total.append(total[-1] + length)
    return Recording(
        block_table=torch.tensor(table, dtype=torch.int32),
        query_start_loc=torch.tensor(total, dtype=torch.int32),
        slot_mapping=torch.zeros(total[-1], dtype=torch.int64),
        block_size=1,
        query_lens=lens,
        kv_lens=[start + length for start, length in zip(starts, lens, strict=True)],
        replay=replay,
    )


def test_every_op_with_a_state_can_run_again() -> None:
    for op in ops.OPS:
        names = list(inspect.signature(op).parameters)
        assert bool(op.token_args) == ("state" in names)
        for place in op.token_args:
            assert re.search(rf"\b{names[place]} \[T,", op.__doc__ or ""), (op, names[place])


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: f"{backend.op.name}-{backend.name}")
def test_states_are_those_of_the_right_tokens(backend: OpBackend) -> None:
    """Two sequences of 6 tokens from states of their own, of which 2 and 5 are right; another one has no drafts."""
    for make in CASES.values():
        torch.manual_seed(1)
        case: Any = make(torch.float32)
        if case.name != backend.op.name:
            continue
        steps = Steps(case, 1, random.Random(0))
        state = torch.randn(steps.state.shape[0], *case.state_shape)
        before = state.clone()
        rows = torch.randn(13, case.inputs[0].shape[1])
        changed = rows.clone()
        replay = StateReplay(torch.tensor([*range(6), *range(7, 13)]))
        verifying = layout([[1, 0, 0, 0, 0, 0, 0], [2, 12, 0, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0, 0]], [1, 1, 1], [6, 1, 6])
        verifying.replay = replay
        out = case(replayable(backend.op, backend.function), changed, state, verifying).clone()
        assert torch.equal(state[[0, 1, 2, 3]], before[[0, 1, 2, 3]])
        alone = before.clone()
        one = layout([[2, 12]], [1], [1])
        assert close(out[6:7], case(backend.function, rows[6:7], alone, one), torch.float32)
        assert close(state[12], alone[12], torch.float32)

        changed.fill_(torch.nan)  # what layers gave an op may be written over
        kept = torch.tensor([0, 1, *range(6, 11)])
        replay.run(kept, layout([[1, 0, 4, 0, 0, 0], [3, 0, 5, 0, 0, 6]], [1, 1], [2, 5]))
        for read, begin, stored in ((1, 0, {2: 4}), (3, 7, {2: 5, 5: 6})):
            block = read
            for token in range(1, max(stored) + 1):
                case(backend.function, rows[begin + token - 1 :][:1], alone, layout([[block, 15]], [1], [1]))
                block = 15
                if token in stored:
                    got, wanted = state[stored[token]], alone[15]
                    assert torch.equal(got, wanted) if backend.batch_invariant else close(got, wanted, torch.float32)
