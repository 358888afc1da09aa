"""Logits that cannot be sampled from fail their request with its reason; the others get their tokens."""

from __future__ import annotations

import pytest
import torch

from quire_interfaces import SamplingParams
from quire_sampling import Sampler, SamplingState

KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.9),
    SamplingParams(temperature=9, top_p=0.9),
    SamplingParams(top_k=300, min_p=0.001),
    SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0, logprobs=3),
]
NAN, INF = float("nan"), float("inf")


def run(params: SamplingParams, spoil: dict[int, float], bad_row: int = 2, vocab_size: int = 400):  # type: ignore[no-untyped-def]
    """Five rows of the same kind and seed, one of them with spoiled logits ({-1: value} spoils all)."""
    state = SamplingState(5, vocab_size)
    for row in range(5):
        state.set_row(row, params, seed=4, num_prompt_tokens=1)
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(0)).repeat(5, 1)
    for place, value in spoil.items():
        logits[bad_row, slice(None) if place == -1 else place] = value
    return Sampler(state).sample(logits, range(5), torch.full((5,), 3), torch.ones(5, 8).long())


@pytest.mark.parametrize("params", KINDS)
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ({7: NAN}, "NaN"),
        ({399: -NAN}, "NaN"),
        ({-1: NAN}, "NaN"),
        ({-1: -INF}, "every logit is -inf"),
        ({9: INF}, "+inf"),
        ({-1: INF}, "+inf"),
        ({-1: -INF, 3: NAN}, "NaN"),
    ],
)
def test_only_the_spoiled_row_fails(params: SamplingParams, spoil: dict[int, float], reason: str) -> None:
    good = run(params, {}).token_ids.tolist()
    assert len(set(good)) == 1

    output = run(params, spoil)

    assert list(output.failed_rows()) == [2]
    assert reason in output.failed_rows()[2]
    tokens = output.token_ids.tolist()
    assert 0 <= tokens.pop(2) < 400  # a token in range, so that the next step can be prepared before anyone looks
    assert tokens == good[:4]


@pytest.mark.parametrize("params", KINDS)
def test_a_single_finite_token_is_sampled(params: SamplingParams) -> None:
    for token_id in (0, 63, 64, 399):
        output = run(params, {-1: -INF, token_id: -1000.0})
        assert output.failed_rows() == {}
        assert int(output.token_ids[2]) == token_id


def test_masks_that_exclude_everything_say_so() -> None:
    state = SamplingState(1, 10)
    params = SamplingParams(allowed_token_ids=(3,), min_tokens=2)
    state.set_row(0, params, seed=0, num_prompt_tokens=1, stop_token_ids=[3])
    output = Sampler(state).sample(torch.zeros(1, 10), [0], torch.tensor([0]), torch.zeros(1, 4).long())
    assert "allowed_token_ids" in output.failed_rows()[0]


@pytest.mark.parametrize("params", KINDS)
def test_extreme_but_finite_logits(params: SamplingParams) -> None:
    big = torch.finfo(torch.float32).max
    output = run(params, {-1: -big, 5: big})
    assert output.failed_rows() == {}
    assert int(output.token_ids[2]) == 5


def test_no_rows_at_all() -> None:
    output = Sampler(SamplingState(4, 100)).sample(
        torch.zeros(0, 100), [], torch.zeros(0).long(), torch.zeros(4, 8).long()
    )
    assert output.token_ids.tolist() == []
    assert output.failed_rows() == {}
    assert output.logprobs() == {}


@pytest.mark.parametrize("shape", [(2, 100), (1, 99), (100,)])
def test_logits_of_a_wrong_shape_are_our_own_callers_error(shape: tuple[int, ...]) -> None:
    sampler = Sampler(SamplingState(4, 100))
    with pytest.raises(ValueError, match=r"logits must be \[1, 100\]"):
        sampler.sample(torch.zeros(shape), [0], torch.zeros(1).long(), torch.zeros(4, 8).long())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_types_are_converted(dtype: torch.dtype) -> None:
    state = SamplingState(1, 100)
    state.set_row(0, SamplingParams(temperature=0), seed=0, num_prompt_tokens=1)
    logits = torch.zeros(1, 200, dtype=dtype)[:, ::2]
    logits[0, 70] = 1
    output = Sampler(state).sample(logits, [0], torch.zeros(1).long(), torch.zeros(1, 8).long())
    assert output.token_ids.tolist() == [70]
