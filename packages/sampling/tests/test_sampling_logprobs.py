"""Log probabilities: of the raw logits, ranked with a fixed order of ties, for rows that asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from quire_interfaces import RequestError, SamplingParams
from quire_sampling import SampleMode, Sampler, SamplingConfig, SamplingState, prompt_logprobs, token_logprobs

SampleOne = Callable[..., SimpleNamespace]


def expected(logits: list[float], token_id: int, k: int) -> tuple[list[int], list[float], int]:
    """The definition, in float64."""
    peak = max(logits)
    normalizer = peak + math.log(math.fsum(math.exp(x - peak) for x in logits))
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    ids = [token_id, *order[:k]]
    return ids, [logits[i] - normalizer for i in ids], order.index(token_id) + 1


@pytest.mark.parametrize("vocab_size", [1, 2, 64, 65, 1000, 9001])
@pytest.mark.parametrize("k", [0, 1, 5, 64])
@pytest.mark.parametrize("grid", [False, True])
def test_equals_the_definition(vocab_size: int, k: int, grid: bool) -> None:
    k = min(k, vocab_size)
    generator = torch.Generator().manual_seed(vocab_size + k)
    logits = torch.randn(19, vocab_size, generator=generator) * 4
    if grid:
        logits = logits.round()
    ids = torch.randint(0, vocab_size, (19,), generator=generator)
    before = logits.clone()

    results = token_logprobs(logits, ids, k).to_host([k] * 19)

    assert torch.equal(logits, before)
    for i, result in enumerate(results):
        token_ids, logprobs, rank = expected(logits[i].tolist(), int(ids[i]), k)
        assert result.token_ids == token_ids
        assert result.rank == rank
        assert result.logprobs == pytest.approx(logprobs, rel=1e-5, abs=1e-5)


def test_raw_logits_before_everything_the_request_asked_for(sample_one: SampleOne) -> None:
    logits = [4.0, 3.0, 2.0, 1.0, 0.0]
    params = SamplingParams(
        temperature=0.5,
        logprobs=2,
        allowed_token_ids=(3,),
        logit_bias={3: 5.0},
        repetition_penalty=2.0,
        frequency_penalty=1.0,
    )
    result = sample_one(logits, params, history=[3, 3], num_prompt_tokens=1)
    token_ids, logprobs, rank = expected(logits, 3, 2)
    assert result.token_id == 3
    assert result.logprobs.token_ids == token_ids == [3, 0, 1]
    assert result.logprobs.rank == rank == 4
    assert result.logprobs.logprobs == pytest.approx(logprobs)


@pytest.mark.parametrize("temperature", [0, 1])
def test_named_tokens_beside_rows_that_want_the_most_likely_ones(temperature: float) -> None:
    named = (7, 299, 0)
    state = SamplingState(3, 300)
    for row, wanted in enumerate(({"logprobs": 2}, {"logprob_token_ids": named}, {})):
        params = SamplingParams(temperature=temperature, **wanted)
        state.set_row(row, params, seed=row, num_prompt_tokens=1)
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    logits[3, 299] = -math.inf
    rows = [1, 0, 2, 1]
    assert state.mode_of(rows) is SampleMode.HOST
    output = Sampler(state).sample(logits.clone(), rows, torch.arange(4), torch.zeros(3, 8).long())
    logprobs = output.logprobs()
    assert {index: len(entry.token_ids) for index, entry in logprobs.items()} == {0: 4, 1: 3, 3: 4}
    for index in (0, 3):
        entry, token_id = logprobs[index], int(output.token_ids[index])
        by_id = dict(zip(*expected(logits[index].tolist(), token_id, 300)[:2], strict=True))
        assert entry.token_ids == [token_id, *named]
        assert entry.logprobs == pytest.approx([by_id[each] for each in entry.token_ids], rel=1e-5, abs=1e-5)
        assert entry.rank == expected(logits[index].tolist(), token_id, 0)[2]
    state.set_row(1, SamplingParams(temperature=temperature, logprobs=1), seed=1, num_prompt_tokens=1)
    assert state.mode_of(rows) is SampleMode.OBSERVED
    again = Sampler(state).sample(logits.clone(), rows, torch.arange(4), torch.zeros(3, 8).long()).logprobs()[0]
    assert again.token_ids == [int(output.token_ids[0]), int(logits[0].argmax())]


def test_named_tokens_have_their_own_bound() -> None:
    state = SamplingState(1, 300, config=SamplingConfig(max_logprobs=2))
    state.set_row(0, SamplingParams(logprob_token_ids=tuple(range(128))), seed=0, num_prompt_tokens=1)
    output = Sampler(state).sample(torch.zeros(1, 300), [0], torch.zeros(1).long(), torch.zeros(1, 8).long())
    assert output.logprobs()[0].token_ids[1:] == list(range(128))
    with pytest.raises(
        RequestError, match="logprob_token_ids must hold token ids below the vocabulary size 300, got 300"
    ):
        state.set_row(0, SamplingParams(logprob_token_ids=(300,)), seed=0, num_prompt_tokens=1)


@pytest.mark.parametrize("temperature", [0, 1])
def test_only_for_rows_that_asked_each_with_its_own_number(temperature: float) -> None:
    wanted = {0: None, 1: 0, 2: 4, 3: None, 4: 20}
    state = SamplingState(5, 300)
    for row, logprobs in wanted.items():
        state.set_row(row, SamplingParams(temperature=temperature, logprobs=logprobs), seed=row, num_prompt_tokens=1)
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    rows = [4, 0, 2, 2, 1, 3]
    output = Sampler(state).sample(logits.clone(), rows, torch.arange(6), torch.zeros(5, 8).long())
    logprobs = output.logprobs()
    assert {index: len(entry.token_ids) for index, entry in logprobs.items()} == {0: 21, 2: 5, 3: 5, 4: 1}
    for index, entry in logprobs.items():
        token_ids, values, rank = expected(
            logits[index].tolist(), int(output.token_ids[index]), len(entry.token_ids) - 1
        )
        assert entry.token_ids == token_ids
        assert entry.rank == rank
        assert entry.logprobs == pytest.approx(values, rel=1e-5)


def test_more_logprobs_than_tokens_gives_all_tokens(sample_one: SampleOne) -> None:
    assert sample_one([1.0, 2.0], SamplingParams(temperature=0, logprobs=20)).logprobs.token_ids == [1, 1, 0]


def test_minus_infinity_stays_minus_infinity() -> None:
    result = token_logprobs(torch.tensor([[1.0, -torch.inf, 0.0]]), torch.tensor([1]), 3).to_host([3])[0]
    assert result.logprobs[0] == -math.inf
    assert result.token_ids == [1, 0, 2, 1]
    assert result.rank == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompt_logprobs_of_each_next_token(dtype: torch.dtype) -> None:
    logits = torch.randn(37, 500, generator=torch.Generator().manual_seed(2)).to(dtype)
    next_token_ids = torch.randint(0, 500, (37,), dtype=torch.int32)
    results = prompt_logprobs(logits, next_token_ids, 3)
    assert len(results) == 37
    for i, result in enumerate(results):
        token_ids, logprobs, rank = expected(logits[i].tolist(), int(next_token_ids[i]), 3)
        assert (result.token_ids, result.rank) == (token_ids, rank)
        assert result.logprobs == pytest.approx(logprobs, rel=1e-5)


def test_prompt_logprobs_of_no_positions() -> None:
    assert prompt_logprobs(torch.zeros(0, 10), torch.zeros(0).long(), 3) == []
