"""`SamplingParams` refuses what makes no sense, by the field's name."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_interfaces import MAX_LOGPROBS, RequestError, SamplingParams
from quire_interfaces.number_range import NumberField, number_fields

WRONG = {
    "n": [0, -1, 129, 1.0, True, "2"],
    "temperature": [-0.1, 101, float("nan"), float("inf"), "hot"],
    "top_p": [0, -1, 1.01, float("nan"), None],
    "top_k": [-2, 1.5, True],
    "min_p": [-0.01, 1.01],
    "repetition_penalty": [0, -1, float("inf"), float("nan"), 1e300, 1e-300, 101],
    "bad_words": [("",), (" ",), (3,), 5, {"a": 1}],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "logit_bias": [{-1: 0.0}, {1: 101.0}, {1: float("nan")}, {1.5: 0.0}],
    "allowed_token_ids": [(), (-1,), (1.5,)],
    "bad_words_token_ids": [((),), (3,), ("ab",)],
    "dry_multiplier": [-1, "1", float("inf")],
    "dry_base": [0.5, 11],
    "dry_allowed_length": [0, 1.5],
    "dry_range": [-1],
    "dry_sequence_breakers": [("",), (-1,), (1.5,)],
    "top_n_sigma": [-2, -0.5],
    "dynatemp_range": [-0.1],
    "dynatemp_exponent": [0, -1],
    "xtc_probability": [1.1],
    "xtc_threshold": [-0.1, float("nan")],
    "mirostat_mode": [3, True],
    "mirostat_tau": [0],
    "mirostat_eta": [0, 2],
    "max_tokens": [-1, -5, 1.5, True],
    "min_tokens": [-1, 0.5],
    "stop": [("",), (3,), 5, "", {"a": 1}],
    "stop_token_ids": [(-1,), ("a",), 5, "ab"],
    "seed": [2**63, -(2**63) - 1, 1.0, True],
    "logprobs": [-2, MAX_LOGPROBS + 1, True],
    "prompt_logprobs": [-2, MAX_LOGPROBS + 1],
    "logprob_token_ids": [(), (-1,), (1.5,), (3, 3), 5, tuple(range(129))],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_wrong_values_name_their_field(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field) as error:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert error.value.param == field


def test_contradictions() -> None:
    with pytest.raises(RequestError, match="min_tokens must not exceed max_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    with pytest.raises(RequestError, match="stop must be left out when detokenize is false"):
        SamplingParams(stop=("x",), detokenize=False)
    with pytest.raises(RequestError, match="logprobs must be left out or 2, the number of logprob_token_ids, got 3"):
        SamplingParams(logprob_token_ids=(5, 6), logprobs=3)


def test_log_probabilities_of_named_tokens_are_as_many() -> None:
    params = SamplingParams(logprob_token_ids=[5, 6])  # type: ignore[arg-type]
    assert (params.logprob_token_ids, params.logprobs) == ((5, 6), 2)
    assert dataclasses.replace(params) == SamplingParams(logprob_token_ids=(5, 6), logprobs=2)


@given(
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(-1, 10**6),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 10**6), st.floats(-100, 100)),
)
def test_right_values_are_kept(**values: object) -> None:
    params = SamplingParams(**values)  # type: ignore[arg-type]
    assert {name: getattr(params, name) for name in values} == values
    assert params.greedy == (values["temperature"] == 0)
    assert dataclasses.replace(params) == params


@pytest.mark.parametrize("field", number_fields(SamplingParams), ids=lambda field: field.name)
def test_numbers_are_taken_up_to_the_ends_of_their_range(field: NumberField) -> None:
    limits = field.range
    inside = [limits.high] if limits.above else [limits.low, limits.high]
    for value in [*inside, field.default, *([limits.off] if limits.off is not None else [])]:
        params = SamplingParams(**{field.name: value})  # type: ignore[arg-type]
        assert getattr(params, field.name) == value
    step = 1 if field.type is int else 1e-9 * max(1.0, abs(limits.high))
    for value in [limits.low if limits.above else limits.low - step, limits.high + step, "1", True, float("nan")]:
        if value != limits.off:
            with pytest.raises(RequestError, match=f"^{field.name} must ") as error:
                SamplingParams(**{field.name: value})  # type: ignore[arg-type]
            assert error.value.param == field.name


def test_every_number_has_a_range() -> None:
    ranged = {field.name for field in number_fields(SamplingParams)}
    others = {field.name: field.type for field in dataclasses.fields(SamplingParams) if field.name not in ranged}
    assert not [name for name, hint in others.items() if str(hint).split(" ")[0] in ("int", "float")]


def test_best_of_is_at_least_n() -> None:
    with pytest.raises(RequestError, match="best_of must be from 3 to 128, got 2"):
        SamplingParams(n=3, best_of=2)
    assert SamplingParams(n=3, best_of=3).best_of == 3


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2  # type: ignore[misc]
