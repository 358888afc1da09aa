"""Inputs of a step against the reference: prompts, decodes, sliding windows, tables of several groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernels_cuda_support import here, poison

from quire_kernels_cuda.triton.step_inputs import decode_inputs, step_inputs
from quire_ops import RowTable
from quire_ops import ops as ref

STEPS = {
    "one decode": [(2, 0, 1)],
    "decodes": [(3, 40, 41), (0, 299, 300), (5, 15, 16), (1, 16, 17)],
    "a prompt over several programs": [(4, 3, 690)],
    "mixed": [(1, 0, 270), (5, 31, 32), (0, 100, 103)],
}


@pytest.mark.parametrize("step", STEPS)
def test_equals_reference(monkeypatch, step):
    poison(monkeypatch)
    torch.manual_seed(0)
    token_ids = torch.randint(0, 1 << 31, (6, 700), dtype=torch.int32)
    tables = tuple(
        RowTable(torch.randint(1, 1000, (6, 704 // size), dtype=torch.int32), size, window)
        for size, window in ((16, None), (8, 20), (64, 1))
    )
    rows, starts, ends = (np.array(column, dtype=np.int64) for column in zip(*STEPS[step], strict=True))
    wanted = ref.step_inputs(token_ids, tables, rows, starts, ends)
    got = step_inputs(here(token_ids), here(tables), rows, starts, ends)
    flat = [*zip(got[:4], wanted[:4], strict=True)]
    for mine, theirs in zip(got.groups, wanted.groups, strict=True):
        flat += zip(mine, theirs, strict=True)
    for mine, theirs in flat:
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.cpu(), theirs)


@pytest.mark.parametrize("starts", [[0], [299, 15, 16], [5, 0, 0, 0, 689]])
def test_decode_inputs_equal_reference(monkeypatch, starts):
    poison(monkeypatch)
    torch.manual_seed(1)
    token_ids = torch.randint(0, 1 << 31, (6, 700), dtype=torch.int32)
    tables = tuple(
        RowTable(torch.randint(1, 1000, (6, 704 // size), dtype=torch.int32), size, window)
        for size, window in ((16, None), (2, 20))
    )
    rows = [(3 * i + 1) % 6 for i in range(len(starts))]
    spans = torch.tensor([rows, starts, [start + 1 for start in starts], list(range(len(starts)))])
    wanted = ref.decode_inputs(token_ids, tables, spans)
    got = decode_inputs(here(token_ids), here(tables), here(spans))
    for mine, theirs in zip((*got[:4], *sum(got.groups, ())), (*wanted[:4], *sum(wanted.groups, ())), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.cpu(), theirs)


def test_sequences_of_any_number_of_tokens_equal_reference(monkeypatch):
    """Some have none, and one many: what steps with prompts in a graph are."""
    poison(monkeypatch)
    torch.manual_seed(1)
    token_ids = torch.randint(0, 1 << 31, (6, 700), dtype=torch.int32)
    tables = (RowTable(torch.randint(1, 1000, (6, 44), dtype=torch.int32), 16, None),
              RowTable(torch.randint(1, 1000, (6, 352), dtype=torch.int32), 2, 20))  # fmt: skip
    spans = torch.tensor([[3, 1, 5, 5, 5], [17, 40, 0, 0, 0], [18, 342, 0, 0, 7], [0, 1, 303, 303, 303]])
    wanted = ref.decode_inputs(token_ids, tables, spans, 310)
    got = decode_inputs(here(token_ids), here(tables), here(spans), 310)
    for mine, theirs in zip((*got[:4], *sum(got.groups, ())), (*wanted[:4], *sum(wanted.groups, ())), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.cpu(), theirs)
