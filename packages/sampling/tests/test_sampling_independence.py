"""A request's token depends on its own logits, parameters, seed and output position, and on nothing around it."""

from __future__ import annotations

import pytest
import torch

from quire_interfaces import SamplingParams
from quire_sampling import Sampler, SamplingState

KINDS = {
    "greedy": SamplingParams(temperature=0),
    "plain": SamplingParams(temperature=0.9),
    "top_k": SamplingParams(top_k=30),
    "large top_k": SamplingParams(top_k=300),
    "top_p": SamplingParams(temperature=0.7, top_p=0.9),
    "flat top_p": SamplingParams(temperature=5.0, top_p=0.9),
    "min_p": SamplingParams(min_p=0.02),
    "edited": SamplingParams(
        repetition_penalty=1.3, frequency_penalty=0.3, logit_bias={5: 2.0}, bad_words_token_ids=((1,), (4, 2))
    ),
}
VOCAB_SIZES = [37, 1000, 32_003]


def sample_alone(
    logits: torch.Tensor, params: SamplingParams, seed: int, history: torch.Tensor, position: int
) -> tuple[int, list[float]]:
    state = SamplingState(1, len(logits))
    state.set_row(0, params, seed=seed, num_prompt_tokens=4)
    output = Sampler(state).sample(logits.unsqueeze(0).clone(), [0], torch.tensor([position]), history.unsqueeze(0))
    return int(output.token_ids[0]), output.max_logits.tolist()


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("threads", [1, 2])
def test_alone_and_among_33_strangers_in_any_row(vocab_size: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(vocab_size)
        kinds = list(KINDS.values())
        num_rows = 34
        state = SamplingState(num_rows, vocab_size)
        history = torch.randint(0, vocab_size, (num_rows, 40), generator=generator)
        positions = torch.randint(4, 40, (num_rows,), generator=generator)
        logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
        places = torch.randperm(num_rows, generator=generator).tolist()
        for i, row in enumerate(places):
            state.set_row(row, kinds[i % len(kinds)], seed=1000 + i, num_prompt_tokens=4)

        together = Sampler(state).sample(logits.clone(), places, positions, history)

        for i, row in enumerate(places):
            alone = sample_alone(logits[i], kinds[i % len(kinds)], 1000 + i, history[row], int(positions[i]))
            assert alone[0] == int(together.token_ids[i]), (i, kinds[i % len(kinds)])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
def test_draft_positions_in_one_call_equal_one_call_per_position(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    history = torch.randint(0, 500, (50,), generator=generator)
    logits = torch.randn(5, 500, generator=generator) * 2
    state = SamplingState(3, 500)
    state.set_row(2, KINDS[kind], seed=77, num_prompt_tokens=4)
    token_ids = torch.zeros(3, 50, dtype=torch.int32)
    token_ids[2] = history

    at_once = Sampler(state).sample(logits.clone(), [2] * 5, torch.arange(20, 25), token_ids).token_ids.tolist()

    one_by_one = [sample_alone(logits[i], KINDS[kind], 77, history, 20 + i)[0] for i in range(5)]
    assert at_once == one_by_one


def test_other_seeds_and_other_positions_give_other_tokens() -> None:
    logits = torch.zeros(5000)
    history = torch.zeros(300, dtype=torch.int64)
    by_seed = {sample_alone(logits, SamplingParams(), seed, history, 10)[0] for seed in range(200)}
    by_position = {sample_alone(logits, SamplingParams(), 0, history, position)[0] for position in range(4, 204)}
    assert len(by_seed) > 180
    assert len(by_position) > 180


def test_only_the_output_position_counts_not_the_place_in_the_sequence() -> None:
    logits = torch.randn(900, generator=torch.Generator().manual_seed(1))
    tokens = []
    for num_prompt_tokens in (1, 5, 30):
        state = SamplingState(1, 900)
        state.set_row(0, SamplingParams(), seed=9, num_prompt_tokens=num_prompt_tokens)
        output = Sampler(state).sample(
            logits.unsqueeze(0).clone(), [0], torch.tensor([num_prompt_tokens + 2]), torch.zeros(1, 64).long()
        )
        tokens.append(int(output.token_ids[0]))
    assert len(set(tokens)) == 1


def test_a_seed_is_taken_modulo_two_to_the_64() -> None:
    logits = torch.zeros(3000)
    history = torch.zeros(8, dtype=torch.int64)
    assert (
        sample_alone(logits, SamplingParams(), -5, history, 5)
        == sample_alone(logits, SamplingParams(), 2**64 - 5, history, 5)
        == sample_alone(logits, SamplingParams(), 2**65 - 5, history, 5)
    )


def test_sampling_twice_changes_nothing() -> None:
    state = SamplingState(4, 700)
    for row, params in enumerate(list(KINDS.values())[:4]):
        state.set_row(row, params, seed=row, num_prompt_tokens=2)
    sampler = Sampler(state)
    logits = torch.randn(4, 700, generator=torch.Generator().manual_seed(0))
    token_ids = torch.zeros(4, 16, dtype=torch.int64)
    results = [
        sampler.sample(logits.clone(), range(4), torch.full((4,), 7), token_ids).token_ids.tolist() for _ in range(3)
    ]
    assert results[0] == results[1] == results[2]
