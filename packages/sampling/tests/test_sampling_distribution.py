"""Tokens follow the exact distribution: chi-square over 100,000 tokens per parameter mix, and a check of the check."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from quire_interfaces import SamplingParams
from quire_sampling import Sampler, SamplingState, uniform

NUM_DRAWS = 100_000
CHUNK = 5_000

MIXES = {
    "plain": SamplingParams(),
    "hot": SamplingParams(temperature=2.5),
    "cold": SamplingParams(temperature=0.4),
    "top_k": SamplingParams(top_k=12),
    "top_p": SamplingParams(top_p=0.8),
    "wide top_p": SamplingParams(temperature=3, top_p=0.97),
    "min_p": SamplingParams(min_p=0.05),
    "all three": SamplingParams(temperature=1.4, top_k=40, top_p=0.9, min_p=0.01),
    "penalties": SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5),
}
HISTORY = [3, 3, 8, 20, 20, 20]
NUM_PROMPT_TOKENS = 2


def sample_many(logits: torch.Tensor, params: SamplingParams, *, by: str) -> torch.Tensor:
    """Counts [V] of 100,000 tokens: of one seed at many positions, or of many seeds at one position."""
    counts = torch.zeros(len(logits), dtype=torch.int64)
    state = SamplingState(CHUNK, len(logits))
    sampler = Sampler(state)
    token_ids = torch.tensor(HISTORY).repeat(CHUNK, 1)
    for start in range(0, NUM_DRAWS, CHUNK):
        if start == 0:
            for row in range(CHUNK):
                state.set_row(row, params, seed=0, num_prompt_tokens=NUM_PROMPT_TOKENS)
        if by == "seed":
            state.sample_table.seeds.copy_(torch.arange(start, start + CHUNK))
        else:  # the same position in the sequence, but further and further from a prompt that moves away
            state.sample_table.num_prompt_tokens.copy_(-torch.arange(start, start + CHUNK))
        batch = logits.repeat(CHUNK, 1)
        output = sampler.sample(batch, range(CHUNK), torch.full((CHUNK,), len(HISTORY) - 1), token_ids)
        counts += output.token_ids.bincount(minlength=len(logits))
    return counts


def chi_square_z(counts: Sequence[int], probabilities: Sequence[float]) -> float:
    """Chi-square statistic as a standard normal deviate (Wilson and Hilferty 1931); rare tokens are pooled."""
    total = sum(counts)
    assert all(count == 0 for count, p in zip(counts, probabilities, strict=True) if p == 0)
    cells, pool_count, pool_expected = [], 0.0, 0.0
    for count, p in zip(counts, probabilities, strict=True):
        if p * total >= 8:
            cells.append((count, p * total))
        else:
            pool_count, pool_expected = pool_count + count, pool_expected + p * total
    if pool_expected > 1:
        cells.append((pool_count, pool_expected))
    freedom = len(cells) - 1
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def make_logits() -> torch.Tensor:
    return torch.randn(150, generator=torch.Generator().manual_seed(5)) * 2


@pytest.mark.parametrize("name", MIXES)
def test_many_seeds_follow_the_exact_distribution(oracle: SimpleNamespace, name: str) -> None:
    logits, params = make_logits(), MIXES[name]
    exact = oracle.distribution(oracle.edited_logits(logits.tolist(), params, HISTORY, NUM_PROMPT_TOKENS), params)

    counts = sample_many(logits, params, by="seed")

    assert counts.sum() == NUM_DRAWS
    assert abs(chi_square_z(counts.tolist(), exact)) < 3.5


@pytest.mark.parametrize("name", ["plain", "top_k", "top_p"])
def test_many_positions_of_one_seed_follow_the_exact_distribution(oracle: SimpleNamespace, name: str) -> None:
    logits, params = make_logits(), MIXES[name]

    counts = sample_many(logits, params, by="position")

    assert abs(chi_square_z(counts.tolist(), oracle.distribution(logits.tolist(), params))) < 3.5


def test_the_statistic_notices_three_percent_of_temperature(oracle: SimpleNamespace) -> None:
    logits = make_logits()
    counts = sample_many(logits, SamplingParams(temperature=1.03), by="seed")

    assert chi_square_z(counts.tolist(), oracle.distribution(logits.tolist(), SamplingParams())) > 3.5


def test_uniform_numbers_equal_the_reference(oracle: SimpleNamespace) -> None:
    seeds = [0, 1, -1, 7, 2**63 - 1, -(2**63), 123456789, 42]
    positions = [0, 1, 2, 1000, 0, 5, 2**31, 131_072]

    numbers = uniform(torch.tensor(seeds), torch.tensor(positions))

    expected = [oracle.uniform_number(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    assert numbers.dtype == torch.float64
    assert numbers.tolist() == expected


def test_neighbouring_seeds_and_positions_are_uncorrelated() -> None:
    seeds, positions = torch.meshgrid(torch.arange(400), torch.arange(400), indexing="ij")
    numbers = uniform(seeds.flatten(), positions.flatten()).view(400, 400) - 0.5
    assert numbers.abs().max() < 0.5
    num_pairs = 399 * 400
    for first, second in ((numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1]), (numbers, numbers.T)):
        pairs = (first * second)[torch.triu(torch.ones_like(first), 1).bool()] if first is numbers else first * second
        correlation = pairs.mean() * 12
        assert abs(correlation) < 4 / math.sqrt(pairs.numel())
    assert abs(numbers.mean()) < 4 / math.sqrt(12 * num_pairs)
