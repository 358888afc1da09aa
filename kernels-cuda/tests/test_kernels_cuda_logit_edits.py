"""Edited logits are the reference's to the bit: biases, masks, words behind others, tokens that may not come yet."""

from __future__ import annotations

import pytest
import torch
from kernels_cuda_support import here, poison

from quire_kernels_cuda.triton.logit_edits import edit_logits
from quire_ops import EDIT_ALWAYS, LogitEditTable, ops

ENTRIES, PREFIX, WIDTH = 150, 3, 40


def make_table(vocab_size: int) -> LogitEditTable:
    """Rows: nothing; biases of many tokens; a mask; words and tokens that may not come yet; all of it at once."""
    table = LogitEditTable.empty(torch.tensor([3, 4, 5, 6, 7]), vocab_size, ENTRIES, PREFIX)
    table.prefixes.fill_(-1)
    for row in (1, 4):
        table.num_entries[row] = 140
        table.ids[row, :140] = torch.randperm(vocab_size)[:140]
        table.values[row] = torch.randn(ENTRIES)
        table.until[row] = EDIT_ALWAYS
    for row, first in ((3, 0), (4, 120)):
        table.num_entries[row] = first + 20
        entries = slice(first, first + 20)
        table.ids[row, entries] = torch.randint(0, vocab_size, (20,), dtype=torch.int32)
        table.ids[row, first : first + 4] = table.ids[row, 0]  # biased as well
        table.values[row, entries] = -torch.inf
        table.until[row, entries] = torch.tensor([EDIT_ALWAYS, 2, 4, 9] * 5, dtype=torch.int32)
        table.prefixes[row, first + 4 : first + 20, -1] = torch.tensor([5, 6, -1, 7] * 4, dtype=torch.int32)
        table.prefixes[row, first + 12 : first + 16, -2] = 6
        table.prefixes[row, first + 16 : first + 20, 0] = 5
    for row in (2, 4):
        table.is_restricted[row] = 1
        table.allowed[row] = torch.randint(-(2**31), 2**31 - 1, table.allowed[row].shape, dtype=torch.int32)
    return table


@pytest.mark.parametrize("vocab_size", [151, 5000])
def test_the_logits_are_the_references(monkeypatch, vocab_size: int) -> None:
    torch.manual_seed(vocab_size)
    table = make_table(vocab_size)
    token_ids = torch.randint(5, 8, (5, WIDTH), dtype=torch.int32)
    rows = torch.tensor([4, 3, 0, 1, 3, 2, 4, 3])  # some of them twice, as drafts have it
    positions = torch.tensor([7, 5, 9, 20, 8, 6, 30, 0])
    logits = torch.randn(len(rows), vocab_size)
    wanted = logits.clone()
    ops.edit_logits(wanted, rows, positions, token_ids, table)
    assert torch.equal(wanted[2], logits[2])
    assert [bool((wanted[i] == -torch.inf).any()) for i in range(len(rows))] == [each in (2, 3, 4) for each in rows]
    assert not torch.equal(wanted[1], wanted[4])
    poison(monkeypatch)
    found = here(logits)
    on_device = LogitEditTable(**{name: here(getattr(table, name)) for name in LogitEditTable.__slots__})
    edit_logits(found, *map(here, (rows, positions, token_ids)), on_device)
    assert torch.equal(found.cpu(), wanted)
