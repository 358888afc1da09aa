"""Drafted and verified samples have the distribution of the model: chi-square over 100,000 of them.

The distribution is computed by hand in float64; drafts come at random, from another distribution than the model's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire_interfaces import SamplingParams
from quire_sampling import Sampler, SamplingState
from quire_spec_decode import accept_drafts

VOCAB, ROWS, ROUNDS = 6, 2000, 50
PROMPT = [0, 1, 1, 4]


def logits() -> Tensor:
    """[VOCAB + 1, VOCAB]: behind the prompt, and behind each first token."""
    return torch.randn(VOCAB + 1, VOCAB, generator=torch.Generator().manual_seed(4)) * 1.5


def probabilities(row: Tensor, outputs: list[int], params: SamplingParams) -> Tensor:
    """What the parameters make of a row of logits, one rule after another."""
    x = row.double().clone()
    for token in range(VOCAB):
        if token in PROMPT or token in outputs:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        count = outputs.count(token)
        x[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    p = (x / params.temperature).softmax(-1)
    p = torch.where(p >= params.min_p * p.max(), p, 0.0)
    order = p.argsort(descending=True)
    if params.top_k > 0:
        p[order[params.top_k :]] = 0
    p = p / p.sum()
    before = p[order].cumsum(0) - p[order]
    p[order[before >= params.top_p]] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 1.6, "top_k": 4, "min_p": 0.1},
        {"temperature": 1.0, "top_p": 0.8},
        {
            "temperature": 0.7,
            "top_p": 0.9,
            "repetition_penalty": 1.4,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.3,
        },
    ],
    ids=["top_k and min_p", "top_p alone", "top_p and penalties"],
)
def test_pairs_of_tokens_have_the_models_distribution(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    state = SamplingState(ROWS, VOCAB)
    for row in range(ROWS):
        state.set_row(row, params, seed=row, num_prompt_tokens=len(PROMPT))
    sampler, table = Sampler(state), logits()
    history = torch.tensor([*PROMPT, 0, 0]).repeat(ROWS, 1)
    generator = torch.Generator().manual_seed(9)
    rows = [row for row in range(ROWS) for _ in range(2)]
    positions = torch.tensor([len(PROMPT) - 1, len(PROMPT)]).repeat(ROWS)
    counts = torch.zeros(VOCAB, VOCAB)
    first, num_accepted = torch.zeros(VOCAB), 0
    for round_ in range(ROUNDS):
        state.sample_table.seeds[:] = torch.arange(ROWS) + round_ * ROWS + 12345
        drafts = torch.multinomial(torch.tensor([5.0, 1, 1, 1, 1, 3]), ROWS, replacement=True, generator=generator)
        history[:, len(PROMPT)] = drafts
        both = torch.stack((table[0].expand(ROWS, VOCAB), table[1 + drafts]), dim=1).reshape(2 * ROWS, VOCAB)
        sampled = sampler.sample(both.clone(), rows, positions, history).token_ids.view(ROWS, 2).tolist()
        for pair, draft in zip(sampled, drafts.tolist(), strict=True):
            accepted = accept_drafts(pair, [draft])
            first[accepted[0]] += 1
            if len(accepted) == 2:
                num_accepted += 1
                counts[accepted[0], accepted[1]] += 1
    assert first.sum() == ROWS * ROUNDS == 100_000
    assert num_accepted > 5000
    assert chi_square(first, probabilities(table[0], [], params)) < LIMIT
    for token in range(VOCAB):
        if counts[token].sum() > 500:
            assert chi_square(counts[token], probabilities(table[1 + token], [token], params)) < LIMIT


LIMIT = 30.0
"""Exceeded once in 70,000 times by chance with five degrees of freedom."""


def chi_square(counts: Tensor, expected: Tensor) -> float:
    assert bool((counts[expected == 0] == 0).all()), "a token that the parameters exclude was drawn"
    kept = expected > 0
    wanted = expected[kept] * counts.sum()
    return float(((counts[kept] - wanted).square() / wanted).sum())
