"""Torch's ways to sample give exactly the token of op `sample`'s reference, whatever the parameters and the logits."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from quire_interfaces import SamplingParams
from quire_ops import ops
from quire_ops.sampling import integer_weights
from quire_sampling import Sampler, SamplingState


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0, 1e-9, 0.2, 0.7, 1, 1.3, 5, 100]),
        top_k=rng.choice([0, 0, 1, 3, 20, 70, 256, 257, 900, 5000]),
        top_p=rng.choice([1, 1, 1e-9, 0.3, 0.8, 0.95, 0.999999]),
        min_p=rng.choice([0, 0, 0, 1e-30, 0.001, 0.1, 1]),
    )


@pytest.mark.parametrize("vocab_size", [1, 63, 300, 4097])
def test_tokens_are_those_of_the_reference(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    generator = torch.Generator().manual_seed(vocab_size)
    num_rows = 400
    state = SamplingState(num_rows, vocab_size)
    for row in range(num_rows):
        state.set_row(row, random_params(rng), seed=rng.getrandbits(64), num_prompt_tokens=rng.randint(1, 5))
    rows = torch.randperm(num_rows, generator=generator)
    positions = torch.randint(5, 100, (num_rows,), generator=generator)
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    logits *= torch.tensor([0, 0.1, 1, 5, 60])[torch.randint(0, 5, (num_rows, 1), generator=generator)]
    logits[::3] = (logits[::3] * 4).round() / 4
    logits[::7, :: rng.randint(2, 9)] = -torch.inf
    logits[::7, -1] = 0

    output = Sampler(state).sample(logits.clone(), rows.tolist(), positions, torch.zeros(num_rows, 128).long())

    tokens, max_logits = ops.sample(logits, rows, positions, state.sample_table)
    assert torch.equal(output.token_ids, tokens)
    assert torch.equal(output.max_logits, max_logits)


def test_weights_are_powers_of_two_to_seven_digits() -> None:
    log2 = -torch.rand(200_000, generator=torch.Generator().manual_seed(0)) * 45
    weights = integer_weights(log2.clone())
    exact = 2.0**40 * torch.exp2(log2.double())
    assert ((weights - exact).abs() <= 1.5e-7 * exact + 1).all()
    assert integer_weights(torch.tensor([0.0, -0.0, -1.0, -40.0, -41.0, -1e30, -torch.inf])).tolist() == [
        2**40, 2**40, 2**39, 1, 0, 0, 0
    ]  # fmt: skip


def test_a_row_that_drew_takes_the_most_likely_token_for_the_next_request() -> None:
    state = SamplingState(2, 50)
    sampling = SamplingParams(temperature=9, top_k=7, top_p=0.5, min_p=0.2)
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    for params in (sampling, replace(sampling, temperature=0)):
        state.set_row(1, params, seed=5, num_prompt_tokens=1)
        seen = set()
        for position in range(1, 40):
            tokens, _ = ops.sample(logits, torch.tensor([1]), torch.tensor([position]), state.sample_table)
            seen.add(int(tokens))
        assert (seen == {int(logits.argmax())}) is params.greedy
