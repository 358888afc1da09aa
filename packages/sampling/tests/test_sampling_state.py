"""Rows are filled, cleared and filled again; a bad request is refused and leaves its row clear."""

from __future__ import annotations

import random

import pytest
import torch

from quire_interfaces import ConfigError, RequestError, SamplingParams
from quire_sampling import Sampler, SamplingConfig, SamplingState

BUSY = SamplingParams(
    temperature=0.5,
    top_k=3,
    top_p=0.5,
    min_p=0.1,
    repetition_penalty=2,
    presence_penalty=1,
    frequency_penalty=1,
    logit_bias={4: 50.0},
    allowed_token_ids=(4, 5),
    bad_words_token_ids=((1, 2),),
    min_tokens=5,
    logprobs=2,
)


def run(state: SamplingState, row: int) -> tuple[list[int], bool]:
    logits = torch.randn(6, state.vocab_size, generator=torch.Generator().manual_seed(3))
    output = Sampler(state).sample(logits, [row] * 6, torch.arange(2, 8), torch.ones(state.max_num_seqs, 10).long())
    return output.token_ids.tolist(), bool(output.logprobs())


FORMER = {
    "masks, bias and penalties": BUSY,
    "dry": SamplingParams(dry_multiplier=50.0, dry_allowed_length=1, dry_sequence_breakers=()),
    "top_n_sigma": SamplingParams(top_n_sigma=0.01),
    "dynamic temperature": SamplingParams(temperature=2.0, dynatemp_range=1.9),
    "xtc": SamplingParams(xtc_probability=1.0, xtc_threshold=0.001),
    "typical_p": SamplingParams(typical_p=0.01),
    "mirostat": SamplingParams(mirostat_mode=2, mirostat_tau=0.1, mirostat_eta=0.9),
}
REPEATS = SamplingParams(temperature=0, logit_bias={1: 20.0})
"""Takes the token of which the history of `run` is made, unless something keeps it from repeating."""


@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.9), REPEATS]
)
@pytest.mark.parametrize("former", FORMER.values(), ids=FORMER)
def test_nothing_of_the_former_request_remains(former: SamplingParams, params: SamplingParams, clear: bool) -> None:
    fresh = SamplingState(3, 200)
    fresh.set_row(1, params, seed=8, num_prompt_tokens=2)
    used = SamplingState(3, 200)
    used.set_row(1, former, seed=1, num_prompt_tokens=1, stop_token_ids=[5])
    if clear:
        used.clear_row(1)
    used.set_row(1, params, seed=8, num_prompt_tokens=2)
    assert run(used, 1) == run(fresh, 1)


def test_a_state_machine_of_rows_equals_fresh_states() -> None:
    rng = random.Random(0)
    choices = [BUSY, SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.8, logprobs=1)]
    state = SamplingState(4, 150)
    held: dict[int, tuple[SamplingParams, int]] = {}
    for _ in range(60):
        row = rng.randrange(4)
        if rng.random() < 0.3:
            state.clear_row(row)
            held.pop(row, None)
        else:
            held[row] = (rng.choice(choices), rng.getrandbits(64))
            state.set_row(row, held[row][0], seed=held[row][1], num_prompt_tokens=2, stop_token_ids=[5])
        for other, (params, seed) in held.items():
            fresh = SamplingState(4, 150)
            fresh.set_row(other, params, seed=seed, num_prompt_tokens=2, stop_token_ids=[5])
            assert run(state, other) == run(fresh, other)


def test_clearing_an_empty_row_does_nothing() -> None:
    state = SamplingState(2, 10)
    state.clear_row(1)
    state.clear_row(1)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (SamplingParams(allowed_token_ids=(3, 50)), "allowed_token_ids"),
        (SamplingParams(logit_bias={50: 1.0}), "logit_bias"),
        (SamplingParams(bad_words_token_ids=((1,), (2, 50))), "bad_words_token_ids"),
        (SamplingParams(bad_words_token_ids=((-1,),)), "bad_words_token_ids"),
        (SamplingParams(logprobs=9), "logprobs"),
        (SamplingParams(logprobs=9, logit_bias={3: 90.0}), "logprobs"),
        (SamplingParams(prompt_logprobs=9), "prompt_logprobs"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_the_row_clear(params: SamplingParams, param: str) -> None:
    state = SamplingState(2, 50, config=SamplingConfig(max_logprobs=8))
    with pytest.raises(RequestError) as refused:
        state.set_row(1, params, seed=0, num_prompt_tokens=1)
    assert refused.value.param == param
    clear = SamplingState(2, 50)
    assert run(state, 1) == run(clear, 1)


def test_an_unknown_always_on_processor_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="'nope'"):
        SamplingState(1, 10, always=["nope"])


@pytest.mark.parametrize("value", [-1, 2**24 + 1, "many", True])
def test_config_bounds(value: object) -> None:
    with pytest.raises(ConfigError, match="max_logprobs"):
        SamplingConfig(max_logprobs=value)  # type: ignore[arg-type]
