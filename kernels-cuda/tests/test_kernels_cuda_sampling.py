"""Draws without a sort are the tokens of the reference, to the bit: ties, tiny temperatures, every filter, masks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kernels_cuda_support import here, poison

from quire_kernels_cuda.triton import sampling
from quire_kernels_cuda.triton.sampling import sample, sample_masked
from quire_ops import SampleTable, ops

# do_sample, temperature, top_k, top_p, min_p
ROWS = [
    (False, 1.0, 0, 1.0, 0.0),
    (True, 1.0, 0, 1.0, 0.0),
    (True, 0.7, 5, 1.0, 0.0),
    (True, 1.3, 0, 0.5, 0.0),
    (True, 0.01, 0, 0.9, 0.0),
    (True, 2.0, 1, 0.3, 0.0),
    (True, 1.0, 20, 0.8, 0.0),
    (True, 1.0, 0, 1.0, 0.1),
    (True, 1.0, 50, 0.95, 0.05),
    (True, 1e-6, 0, 0.99, 0.01),
    (True, 1.0, 3, 0.2, 0.5),
    (True, 5.0, 0, 1e-4, 0.0),
]


def make_table(vocab_size: int) -> SampleTable:
    do_sample, temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*ROWS, strict=True))
    return SampleTable(
        do_sample=do_sample,
        seeds=torch.randint(-(2**63), 2**63 - 1, (len(ROWS),)),
        num_prompt_tokens=torch.randint(0, 99, (len(ROWS),)),
        inv_temperature=(math.log2(math.e) / temperature.double()).float(),
        top_k=torch.where(top_k == 0, vocab_size, top_k.clamp(max=vocab_size)),
        top_p=top_p.double(),
        min_log2=min_p.double().log2().float(),
    )


def on_device(table: SampleTable) -> SampleTable:
    return SampleTable(**{name: here(getattr(table, name)) for name in SampleTable.__slots__})


def logits_and_positions(vocab_size: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(num_rows, vocab_size) * 3
    logits[::2] = (logits[::2] * 2).round() / 2  # many equal ones, 0.0 and -0.0 among them
    return logits, torch.randint(99, 9999, (num_rows,))


@pytest.mark.parametrize("vocab_size", [1, 37, 5000])
def test_draws_what_the_reference_draws(monkeypatch, vocab_size):
    torch.manual_seed(vocab_size)
    table = make_table(vocab_size)
    rows = torch.randperm(len(ROWS)).repeat(2 if vocab_size == 37 else 1)
    logits, positions = logits_and_positions(vocab_size, len(rows))
    if vocab_size > 1:
        logits[:, vocab_size // 2] = -torch.inf
    wanted = ops.sample(logits, rows, positions, table)
    poison(monkeypatch)
    tokens, max_logits = sample(*map(here, (logits, rows, positions)), on_device(table))
    assert torch.equal(tokens.cpu(), wanted[0])
    assert torch.equal(max_logits.cpu(), wanted[1])


def long_logits(kind: str, vocab_size: int) -> torch.Tensor:
    logits = torch.randn(vocab_size)
    if kind == "peaked":
        logits[[5, vocab_size - 3]] = torch.tensor([16.0, 14.5])
    elif kind == "rounded":
        logits = (logits * 6).bfloat16().float()
    elif kind == "in steps":  # nothing within a bin is spread as in a histogram of many
        logits = torch.full((vocab_size,), 2.0) - 0.3 * (torch.arange(vocab_size) % 7)
    elif kind == "few":
        logits = torch.full((vocab_size,), -torch.inf)
        logits[[1, 70, vocab_size - 1]] = torch.tensor([0.5, 1.0, 0.25])
    return logits


@pytest.mark.parametrize(
    ("kind", "chosen"), [("flat", [3]), ("peaked", [3, 8]), ("rounded", [3]), ("in steps", [3, 9]), ("few", [2, 6])]
)
def test_draws_of_many_pieces_wherever_the_cutoff_is(monkeypatch, kind, chosen):
    """More tokens than a program looks at, and cutoffs that no estimate finds."""
    vocab_size = 9000
    torch.manual_seed(3)
    table = make_table(vocab_size)
    rows = torch.tensor(chosen)
    logits = long_logits(kind, vocab_size).repeat(len(rows), 1)
    positions = torch.randint(99, 9999, (len(rows),))
    wanted = ops.sample(logits, rows, positions, table)
    poison(monkeypatch)
    tokens, _ = sample(*map(here, (logits, rows, positions)), on_device(table))
    assert torch.equal(tokens.cpu(), wanted[0])


def test_the_range_of_candidates_is_narrow_and_holds_the_cutoff(monkeypatch):
    """Of logits as networks give them only few tokens are gathered, and none a second time."""
    vocab_size, seen = 20_000, []
    kernel = sampling.gather_kernel

    class Watched:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **options: Any) -> None:
                kernel[grid](*args, **options)
                counts = args[kernel.arg_names.index("counts")]
                seen.extend((counts, counts.clone()))

            return launch

    monkeypatch.setattr(sampling, "gather_kernel", Watched())
    torch.manual_seed(4)
    table, rows = make_table(vocab_size), torch.tensor([2, 3, 6])  # top_k, top_p, both
    logits = torch.randn(len(rows), vocab_size)
    sample(*map(here, (logits, rows, rows)), on_device(table))
    counts, before = seen
    assert torch.equal(counts, before)
    assert (counts[:, :, 2].sum(1) < vocab_size // 30).all()


def test_draws_among_the_tokens_of_a_mask(monkeypatch):
    """Rows with masks, of one token too, and rows with none; what a mask leaves out may be NaN."""
    vocab_size = 157
    torch.manual_seed(vocab_size)
    table, rows = make_table(vocab_size), torch.randperm(len(ROWS))
    logits, positions = logits_and_positions(vocab_size, len(rows))
    bitmask = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32)), dtype=torch.int32)
    bitmask[:, 1] |= 16  # token 36
    bitmask[1] = 0
    bitmask[1, 1] = 1
    mask_of = torch.tensor([0, 1, 2, -1] * 3)
    excluded = ((bitmask[0, 0] >> torch.arange(32)) & 1) == 0
    logits[0, int(excluded.nonzero()[0])] = torch.nan
    wanted = ops.sample_masked(logits, rows, positions, table, mask_of, bitmask)
    poison(monkeypatch)
    arguments = map(here, (logits.clone(), rows, positions))
    tokens, max_logits = sample_masked(*arguments, on_device(table), here(mask_of), here(bitmask))
    assert torch.equal(tokens.cpu(), wanted[0])
    assert torch.equal(max_logits.cpu(), wanted[1])
    assert tokens[mask_of == 1].tolist() == [32] * 3


def test_rows_without_a_likely_token_give_some_token():
    logits = torch.full((4, 70), -torch.inf)
    logits[1, 5] = torch.nan
    logits[2, 69] = 1.0
    logits[3, 7] = torch.inf
    rows = torch.ones(4, dtype=torch.int64)
    tokens, max_logits = sample(*map(here, (logits, rows, rows)), on_device(make_table(70)))
    assert ((tokens >= 0) & (tokens < 70)).all()
    assert tokens[2] == 69
    assert max_logits[1].isnan()
    assert max_logits.cpu()[[0, 2, 3]].tolist() == [-torch.inf, 1.0, torch.inf]
