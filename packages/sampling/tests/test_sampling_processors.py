"""Custom logits processors: chosen by name, given the history, and alone in their failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from quire_interfaces import RequestError, SamplingParams
from quire_sampling import Sampler, SamplingState
from quire_testkit.conformance.logits_processor import LogitsProcessorSuite

SampleOne = Callable[..., SimpleNamespace]


def chosen(*names: str, **params: object) -> SamplingParams:
    return SamplingParams(temperature=0, extra_args={"logits_processors": list(names)}, **params)  # type: ignore[arg-type]


def no_repeats(token_ids: Sequence[int], num_prompt_tokens: int, logits: Tensor) -> Tensor:
    """Forbid every token of the output."""
    logits[torch.tensor(token_ids[num_prompt_tokens:], dtype=torch.int64)] = -torch.inf
    return logits


def negate(token_ids: Sequence[int], num_prompt_tokens: int, logits: Tensor) -> Tensor:
    return -logits


def explode(token_ids: Sequence[int], num_prompt_tokens: int, logits: Tensor) -> Tensor:
    raise KeyError("no such table")


PROCESSORS = {"no_repeats": no_repeats, "negate": negate, "explode": explode}


class TestNoRepeats(LogitsProcessorSuite):
    def make_processor(self) -> Callable[..., Tensor]:
        return no_repeats


class TestNegate(LogitsProcessorSuite):
    def make_processor(self) -> Callable[..., Tensor]:
        return negate


def test_runs_for_those_who_chose_it(sample_one: SampleOne) -> None:
    logits = [5.0, 4.0, 3.0]
    assert sample_one(logits, chosen("negate"), processors=PROCESSORS).token_id == 2
    assert sample_one(logits, SamplingParams(temperature=0), processors=PROCESSORS).token_id == 0


def test_gets_exactly_the_known_tokens(sample_one: SampleOne) -> None:
    seen = []

    def spy(token_ids: Sequence[int], num_prompt_tokens: int, logits: Tensor) -> Tensor:
        seen.append((list(token_ids), num_prompt_tokens, logits.shape, logits.dtype))
        return logits

    state = SamplingState(2, 4, logits_processors={"spy": spy})
    state.set_row(1, chosen("spy"), seed=0, num_prompt_tokens=2)
    token_ids = torch.tensor([[0] * 6, [3, 2, 1, 0, 3, 3]])
    Sampler(state).sample(torch.zeros(2, 4), [1, 1], torch.tensor([2, 3]), token_ids)
    assert seen == [([3, 2, 1], 2, (4,), torch.float32), ([3, 2, 1, 0], 2, (4,), torch.float32)]


def test_always_on_ones_run_first_and_for_everybody() -> None:
    calls = []

    def named(name: str) -> Callable[..., Tensor]:
        def processor(token_ids: Sequence[int], num_prompt_tokens: int, logits: Tensor) -> Tensor:
            calls.append(name)
            return logits

        return processor

    processors = {name: named(name) for name in ("a", "b", "c")}
    state = SamplingState(2, 4, logits_processors=processors, always=["c"])
    state.set_row(0, chosen("b", "a"), seed=0, num_prompt_tokens=1)
    state.set_row(1, SamplingParams(), seed=0, num_prompt_tokens=1)
    Sampler(state).sample(torch.zeros(2, 4), [0, 1], torch.tensor([0, 0]), torch.zeros(2, 4).long())
    assert calls == ["c", "b", "a", "c"]


def test_sees_masks_and_bias_and_comes_before_penalties(sample_one: SampleOne) -> None:
    seen = []

    def spy(token_ids: Sequence[int], num_prompt_tokens: int, logits: Tensor) -> Tensor:
        seen.append(logits.tolist())
        return logits

    params = chosen("spy", allowed_token_ids=(0, 1), logit_bias={1: 1.0}, repetition_penalty=2.0)
    sample_one([4.0, 4.0, 4.0], params, processors={"spy": spy})
    assert seen == [[4.0, 5.0, -float("inf")]]


def wrong_shape(token_ids: Sequence[int], num_prompt_tokens: int, logits: Tensor) -> Tensor:
    return logits[:-1]


def wrong_type(token_ids: Sequence[int], num_prompt_tokens: int, logits: Tensor) -> list[float]:
    return logits.tolist()  # type: ignore[no-any-return]


def wrong_dtype(token_ids: Sequence[int], num_prompt_tokens: int, logits: Tensor) -> Tensor:
    return logits.double()


def makes_nan(token_ids: Sequence[int], num_prompt_tokens: int, logits: Tensor) -> Tensor:
    return logits / 0 * 0


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (explode, "raised KeyError: 'no such table'"),
        (wrong_shape, "must return a tensor of shape [4], got [3]"),
        (wrong_type, "must return a tensor of shape [4], got list"),
        (wrong_dtype, "must return float32"),
        (makes_nan, "NaN"),
    ],
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_bad_one_fails_its_request_only(processor: Callable[..., Tensor], message: str, temperature: float) -> None:
    state = SamplingState(3, 4, logits_processors={"bad": processor})
    for row in range(3):
        extra_args = {"logits_processors": ["bad"]} if row == 1 else None
        params = SamplingParams(temperature=temperature, extra_args=extra_args)
        state.set_row(row, params, seed=row, num_prompt_tokens=1)
    logits = torch.tensor([[0.0, 50.0, 0.0, 0.0]]).repeat(3, 1)
    output = Sampler(state).sample(logits, [2, 1, 0], torch.zeros(3).long(), torch.zeros(3, 4).long())

    failed = output.failed_rows()
    assert list(failed) == [1]
    assert message in failed[1]
    assert list(output.failures()) == [1]
    assert output.token_ids[[0, 2]].tolist() == [1, 1]
    assert 0 <= int(output.token_ids[1]) < 4


def test_a_failure_behind_a_draft_is_told_apart() -> None:
    def fails_later(token_ids: Sequence[int], num_prompt_tokens: int, logits: Tensor) -> Tensor:
        if len(token_ids) > 2:
            raise ValueError("too long")
        return logits

    state = SamplingState(1, 4, logits_processors={"late": fails_later})
    state.set_row(0, chosen("late"), seed=0, num_prompt_tokens=1)
    output = Sampler(state).sample(torch.zeros(3, 4), [0] * 3, torch.tensor([1, 2, 3]), torch.zeros(1, 8).long())
    assert list(output.failures()) == [1, 2]
    assert list(output.processor_errors) == [0]


@pytest.mark.parametrize("names", [["nope"], [7], "negate", 3, {"negate": 1}])
def test_unknown_names_are_refused_with_the_choices(names: object) -> None:
    state = SamplingState(1, 4, logits_processors=PROCESSORS)
    params = SamplingParams(extra_args={"logits_processors": names})
    with pytest.raises(RequestError) as refused:
        state.set_row(0, params, seed=0, num_prompt_tokens=1)
    assert refused.value.param == "extra_args.logits_processors"


def test_unknown_name_lists_what_there_is() -> None:
    state = SamplingState(1, 4, logits_processors=PROCESSORS)
    with pytest.raises(RequestError, match=r"'nope'; registered: explode, negate, no_repeats"):
        state.set_row(0, chosen("nope"), seed=0, num_prompt_tokens=1)
