"""What requests may ask of the raw logits, one thing at a time and in combination."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from quire_interfaces import SamplingParams
from quire_sampling import Sampler, SamplingState

SampleOne = Callable[..., SimpleNamespace]
FALLING = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0]


def greedy(**params: object) -> SamplingParams:
    return SamplingParams(temperature=0, **params)  # type: ignore[arg-type]


def test_greedy_takes_the_lowest_of_equal_ids(sample_one: SampleOne) -> None:
    assert sample_one([1.0, 3.0, 3.0, 3.0, 2.0], greedy()).token_id == 1
    assert sample_one([0.0] * 200, greedy()).token_id == 0
    tied = [0.0] * 300
    tied[70] = tied[129] = tied[299] = 5.0
    assert sample_one(tied, greedy()).token_id == 70


@pytest.mark.parametrize(("allowed", "expected"), [((3,), 3), ((5, 4, 4), 4), ((0, 5), 0)])
def test_only_allowed_tokens(sample_one: SampleOne, allowed: tuple[int, ...], expected: int) -> None:
    assert sample_one(FALLING, greedy(allowed_token_ids=allowed)).token_id == expected


@pytest.mark.parametrize(
    ("words", "history", "expected"),
    [
        (((0,),), [5], 1),  # a single token is never sampled
        (((0,), (1,)), [5], 2),
        (((4, 0),), [2, 4], 1),  # completed across the border of prompt and output
        (((4, 0),), [4, 2], 0),  # not completed here
        (((4, 0), (2, 4, 1)), [2, 4], 2),
        (((4, 0), (3, 4, 1)), [2, 4], 1),
        (((4, 4, 4, 4, 4, 0),), [4, 4], 0),  # longer than the history
        (((3, 0), (4, 0)), [2, 4], 1),  # two words with the same end: one match decides
        (((4, 0), (3, 0)), [2, 4], 1),
        ((*[(5, 3)] * 99, (3, 1, 4, 1, 5, 0), (4, 5, 1)), [2, 3, 1, 4, 1, 5], 1),  # lengths that differ
        ((*[(5, 3)] * 99, (3, 1, 4, 1, 5, 0), (1, 5, 1)), [2, 3, 1, 4, 1, 5], 2),
        (((4,) * 63 + (0,), (4, 1)), [4] * 63, 2),
        (((4,) * 63 + (0,), (4, 1)), [4] * 62, 0),
    ],
)
def test_bad_words(
    sample_one: SampleOne, words: tuple[tuple[int, ...], ...], history: list[int], expected: int
) -> None:
    result = sample_one(FALLING, greedy(bad_words_token_ids=words), history=history, num_prompt_tokens=len(history))
    assert result.token_id == expected


def test_one_long_bad_word_does_not_make_short_ones_long() -> None:
    state = SamplingState(1, 100)
    words = (*[(token_id, 1) for token_id in range(90)], (2,), tuple(range(64)), tuple(range(40)))
    state.set_row(0, greedy(bad_words_token_ids=words), seed=0, num_prompt_tokens=1)
    assert [tuple(table.prefixes.shape) for table in state.settings["bad_words"][0]] == [(1, 0), (90, 1), (2, 63)]


def test_rows_with_the_same_lists_share_their_tables() -> None:
    state = SamplingState(3, 100)
    for row, word in enumerate((1, 1, 2)):
        params = greedy(bad_words_token_ids=((word, 3), [4, 5]), allowed_token_ids=(7, word))
        state.set_row(row, params, seed=0, num_prompt_tokens=1)
    assert state.settings["bad_words"][0] is state.settings["bad_words"][1]
    assert state.settings["allowed_token_ids"][0] is state.settings["allowed_token_ids"][1]
    assert [table.last.tolist() for table in state.settings["bad_words"][2]] == [[3, 5]]
    assert [state.settings["allowed_token_ids"][row].tolist() for row in (0, 2)] == [[1, 7], [2, 7]]


@pytest.mark.parametrize(("num_output_tokens", "expected"), [(0, 2), (2, 2), (3, 0), (9, 0)])
def test_no_stop_token_before_min_tokens(sample_one: SampleOne, num_output_tokens: int, expected: int) -> None:
    history = [5] * (4 + num_output_tokens)
    params = greedy(min_tokens=3)
    result = sample_one(FALLING, params, history=history, num_prompt_tokens=4, stop_token_ids=[1, 0, 999])
    assert result.token_id == expected


def test_logit_bias_is_added(sample_one: SampleOne) -> None:
    assert sample_one(FALLING, greedy(logit_bias={4: 4.5})).token_id == 4
    assert sample_one(FALLING, greedy(logit_bias={0: -1.0, 5: 4.0})).token_id == 0  # 8, 8, .., 8: the lowest id
    assert sample_one(FALLING, greedy(logit_bias={0: -100, 1: -100})).token_id == 2


def test_repetition_penalty_counts_prompt_and_output_and_both_signs(sample_one: SampleOne) -> None:
    params = greedy(repetition_penalty=2.0)
    assert sample_one([4.0, 2.5, 0.0], params, history=[0], num_prompt_tokens=1).token_id == 1  # 2, 2.5
    assert sample_one([4.0, 2.5, 0.0], params, history=[2, 0], num_prompt_tokens=1).token_id == 1
    assert sample_one([-1.0, -1.5, -9.0], params, history=[0]).token_id == 1  # -2, -1.5
    assert sample_one([4.0, 2.5, 0.0], params, history=[1]).token_id == 0


def test_presence_counts_once_and_only_the_output(sample_one: SampleOne) -> None:
    params = greedy(presence_penalty=1.5)
    assert sample_one([4.0, 2.0, 0.0], params, history=[0, 0, 0], num_prompt_tokens=3).token_id == 0
    assert sample_one([4.0, 2.0, 0.0], params, history=[2, 0, 0, 0], num_prompt_tokens=1).token_id == 0  # 2.5
    assert sample_one([4.0, 2.75, 0.0], params, history=[2, 0], num_prompt_tokens=1).token_id == 1


def test_frequency_counts_each_occurrence_in_the_output(sample_one: SampleOne) -> None:
    params = greedy(frequency_penalty=1.5)
    assert sample_one([4.0, 2.0, 0.0], params, history=[0, 0, 0], num_prompt_tokens=3).token_id == 0
    assert sample_one([4.0, 2.0, 0.0], params, history=[2, 0], num_prompt_tokens=1).token_id == 0  # 2.5
    assert sample_one([4.0, 2.0, 0.0], params, history=[2, 0, 0], num_prompt_tokens=1).token_id == 1  # 1


def test_negative_penalties_reward(sample_one: SampleOne) -> None:
    assert sample_one([4.0, 3.0], greedy(presence_penalty=-1.5), history=[0, 1], num_prompt_tokens=1).token_id == 1


def test_tokens_after_the_position_do_not_count() -> None:
    state = SamplingState(1, 3)
    state.set_row(0, greedy(frequency_penalty=2.0), seed=0, num_prompt_tokens=1)
    token_ids = torch.tensor([[2, 1, 0, 0, 0, 0]])  # zeros: left over from another request
    output = Sampler(state).sample(torch.tensor([[4.0, 3.5, 0.0]]), [0], torch.tensor([1]), token_ids)
    assert output.token_ids.tolist() == [0]


def test_masked_tokens_stay_masked_under_penalties_and_bias(sample_one: SampleOne) -> None:
    params = greedy(allowed_token_ids=(3,), logit_bias={0: 100.0}, repetition_penalty=0.1, frequency_penalty=-2.0)
    assert sample_one(FALLING, params, history=[0, 0, 0], num_prompt_tokens=1).token_id == 3


@pytest.mark.parametrize("temperature", [1e-9, 1e-30, 1e-300])
def test_a_tiny_temperature_is_greedy(sample_one: SampleOne, temperature: float) -> None:
    for seed in range(20):
        assert sample_one(FALLING, SamplingParams(temperature=temperature), seed=seed).token_id == 0


def test_top_k_keeps_exactly_k_of_equal_tokens(sample_one: SampleOne) -> None:
    for k, vocab_size in ((3, 500), (300, 500), (1, 2), (64, 65)):
        params = SamplingParams(top_k=k)
        seen = {sample_one([1.0] * vocab_size, params, seed=seed).token_id for seed in range(60)}
        assert max(seen) < k


@pytest.mark.parametrize("vocab_size", [4, 400])
@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75])
def test_top_p_that_is_reached_exactly_keeps_no_more(sample_one: SampleOne, vocab_size: int, top_p: float) -> None:
    params = SamplingParams(top_p=top_p)
    logits = [0.0, 0.0, 0.0, 0.0] + [-float("inf")] * (vocab_size - 4)
    seen = {sample_one(logits, params, seed=seed).token_id for seed in range(60)}
    assert seen == set(range(int(4 * top_p)))


def test_penalties_of_more_rows_than_one_table_holds() -> None:
    num_rows = 150
    state = SamplingState(num_rows, 5)
    for row in range(num_rows):
        state.set_row(row, greedy(frequency_penalty=1.0), seed=0, num_prompt_tokens=1)
    token_ids = torch.tensor([[4, 0, 0, 0], [4, 1, 1, 1], [4, 0, 1, 4]]).repeat(num_rows // 3, 1)
    logits = torch.tensor([2.5, 2.0, 1.0, 0.5, 0.0]).repeat(num_rows, 1)
    output = Sampler(state).sample(logits, range(num_rows), torch.full((num_rows,), 3), token_ids)
    assert output.token_ids.tolist() == [1, 0, 0] * (num_rows // 3)
