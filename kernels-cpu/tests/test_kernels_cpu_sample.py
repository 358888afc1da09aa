"""Draws of the kernels are those of the reference, token by token: no tolerance."""

from __future__ import annotations

import pytest
import torch
from kernels_cpu_steps import make_sample_table
from torch import Tensor

from quire_kernels_cpu.sampling import sample, sample_masked
from quire_ops import ops

NUM_ROWS = 500


def make_logits(vocab_size: int, generator: torch.Generator) -> Tensor:
    """Rows from all-equal to very peaked; some with many equal logits, some with tokens that are masked out."""
    logits = torch.randn(NUM_ROWS, vocab_size, generator=generator)
    logits *= torch.tensor([0, 0.1, 1, 5, 60])[torch.randint(0, 5, (NUM_ROWS, 1), generator=generator)]
    logits[::3] = (logits[::3] * 4).round() / 4
    logits[::7, ::3] = -torch.inf
    logits[::7, -1] = 0
    return logits


@pytest.mark.parametrize("vocab_size", [1, 5, 64, 300, 1000, 4097])
def test_tokens_equal_the_reference(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    table, logits = make_sample_table(NUM_ROWS, vocab_size, vocab_size), make_logits(vocab_size, generator)
    rows = torch.randperm(NUM_ROWS, generator=generator)
    positions = torch.randint(5, 100, (NUM_ROWS,), generator=generator)

    tokens, max_logits = sample(logits, rows, positions, table)

    expected, expected_peaks = ops.sample(logits, rows, positions, table)
    assert torch.equal(tokens, expected)
    assert torch.equal(max_logits, expected_peaks)
    alone = [int(sample(logits[i : i + 1], rows[i : i + 1], positions[i : i + 1], table)[0]) for i in range(40)]
    assert alone == tokens[:40].tolist()


@pytest.mark.parametrize(("place", "value"), [(0, torch.nan), (299, torch.nan), (256, torch.inf), (None, -torch.inf)])
def test_rows_that_are_not_finite_are_told_and_disturb_nobody(place: int | None, value: float) -> None:
    generator = torch.Generator().manual_seed(3)
    table, logits = make_sample_table(NUM_ROWS, 300, 3), make_logits(300, generator)
    rows, positions = torch.arange(NUM_ROWS), torch.full((NUM_ROWS,), 9)
    good, _ = sample(logits, rows, positions, table)
    logits[1::2, slice(None) if place is None else place] = value

    tokens, max_logits = sample(logits, rows, positions, table)

    assert torch.equal(tokens[::2], good[::2])
    assert torch.equal(max_logits.nan_to_num(7), logits.amax(-1).nan_to_num(7))
    assert not max_logits[1::2].isfinite().any()
    assert ((tokens >= 0) & (tokens < 300)).all()


@pytest.mark.parametrize("vocab_size", [1, 31, 64, 65, 300, 1000, 4097])
def test_masked_tokens_equal_the_reference(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    table, logits = make_sample_table(NUM_ROWS, vocab_size, vocab_size), make_logits(vocab_size, generator)
    rows = torch.randperm(NUM_ROWS, generator=generator)
    positions = torch.randint(5, 100, (NUM_ROWS,), generator=generator)
    num_masks = NUM_ROWS // 2
    mask_of = torch.full((NUM_ROWS,), -1)
    mask_of[torch.randperm(NUM_ROWS, generator=generator)[:num_masks]] = torch.arange(num_masks)
    # From nothing allowed over whole words without a bit to everything allowed.
    share = torch.rand(num_masks, 1, 1, generator=generator)
    bits = torch.rand(num_masks, -(-vocab_size // 32), 32, generator=generator) < share
    bits &= torch.rand(num_masks, bits.shape[1], 1, generator=generator) < 0.6
    bits[0], bits[1] = False, True
    bitmask = (bits.long() << torch.arange(32)).sum(-1).to(torch.int32)

    expected, expected_peaks = ops.sample_masked(logits, rows, positions, table, mask_of, bitmask)
    given = logits.clone()
    tokens, max_logits = sample_masked(given, rows, positions, table, mask_of, bitmask)

    assert torch.equal(tokens, expected)
    assert torch.equal(max_logits, expected_peaks)
    assert torch.equal(given[mask_of < 0], logits[mask_of < 0])
    allowed = bits.flatten(1)[:, :vocab_size][mask_of]
    finite = (mask_of >= 0) & max_logits.isfinite()
    assert allowed[finite, tokens[finite]].all()
