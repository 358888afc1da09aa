"""Penalized logits are the reference's to the bit: every penalty, ties, empty outputs, ids that have no logit."""

from __future__ import annotations

import pytest
import torch
from kernels_cuda_support import here, poison

from quire_kernels_cuda.triton.penalties import penalize
from quire_ops import PenaltyTable, ops

# repetition, presence, frequency, tokens of the prompt, position of the last known token
ROWS = [
    (1.3, 0.0, 0.0, 5, 20),
    (0.7, 0.0, 0.0, 9, 8),
    (1.0, 0.6, 0.0, 3, 40),
    (1.0, 0.0, 0.37, 1, 1030),
    (1.7, -0.6, -0.3, 700, 1100),
    (1.0, 0.0, 0.0, 4, 30),
    (1.1, 0.5, 0.2, 2, 0),
]


@pytest.mark.parametrize("vocab_size", [37, 5000])
def test_the_logits_are_the_references(monkeypatch, vocab_size):
    torch.manual_seed(vocab_size)
    repetition, presence, frequency, prompts, positions = (torch.tensor(column) for column in zip(*ROWS, strict=True))
    columns = {"repetition": repetition, "presence": presence, "frequency": frequency, "num_prompt_tokens": prompts}
    table = PenaltyTable(**columns)
    token_ids = torch.randint(0, vocab_size, (len(ROWS), 1200), dtype=torch.int32)
    token_ids[:, 3:6] = torch.tensor([vocab_size, -1, vocab_size - 1], dtype=torch.int32)
    rows = torch.tensor([4, 0, 6, 2, 2, 5, 3, 1])  # one of them twice, as drafts have it
    logits = torch.randn(len(rows), vocab_size) * 3
    logits[:, 7], logits[:, 8], logits[3, 1] = 0.0, -torch.inf, -0.0
    starts = positions[rows].clone()
    starts[4] -= 7
    wanted = logits.clone()
    ops.penalize(wanted, rows, starts, token_ids, table)
    assert torch.equal(wanted[5], logits[5])
    assert not torch.equal(wanted[3], wanted[4])
    poison(monkeypatch)
    found = here(logits)
    on_device = PenaltyTable(**{name: here(column) for name, column in columns.items()})
    penalize(found, *map(here, (rows, starts, token_ids)), on_device)
    assert torch.equal(found.cpu(), wanted)
