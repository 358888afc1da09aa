"""Lists of tokens on the device: logits edited by op `edit_logits` are those that options edit row by row."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from quire_interfaces import EDIT_ENTRIES, SamplingParams
from quire_ops import ops
from quire_sampling import SampleMode, Sampler, SamplingState

VOCAB_SIZE, NUM_ROWS = 1100, 5


def make_sampler(*, is_listed: bool) -> Sampler:
    state = SamplingState(NUM_ROWS, VOCAB_SIZE)
    return Sampler(state, edit_logits=ops.edit_logits if is_listed else None)


def random_params(rng: random.Random) -> SamplingParams:
    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.sample(range(VOCAB_SIZE), count))

    fields: dict[str, Any] = {
        "logit_bias": {token: rng.choice([-100.0, 0.3, 2.0]) for token in tokens(7)},
        "bad_words_token_ids": ((3,), (1, 4), (1, 1, 5), (0, 1, 2, 0, 6), *((token,) for token in tokens(30))),
        "allowed_token_ids": tokens(600),
        "min_tokens": 3,
    }
    return SamplingParams(**{name: fields[name] for name in rng.sample(sorted(fields), rng.randint(1, 4))})


@pytest.mark.parametrize("seed", range(6))
def test_logits_are_those_of_options_row_by_row(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    listed, host = make_sampler(is_listed=True), make_sampler(is_listed=False)
    for row in range(NUM_ROWS):
        params = random_params(rng)
        for sampler in (listed, host):
            sampler.state.set_row(row, random_params(random.Random(row)), seed=1, num_prompt_tokens=4)
            sampler.state.set_row(row, params, seed=1, num_prompt_tokens=4, stop_token_ids=(2, 9, VOCAB_SIZE + 1))
    assert host.state.mode_of(range(NUM_ROWS)) is SampleMode.HOST
    assert listed.state.mode_of(range(NUM_ROWS)) is SampleMode.EDITED
    rows = torch.tensor([0, 1, 1, 2, 3, 4])
    positions, history = torch.randint(0, 12, (6,)), torch.randint(0, 3, (NUM_ROWS, 12))
    logits = torch.randn(6, VOCAB_SIZE)
    wanted = logits.clone()
    host._edit(wanted, rows.tolist(), rows, positions, history)
    assert listed.state.edit_lists is not None
    ops.edit_logits(logits, rows, positions, history, listed.state.edit_lists.table)
    assert torch.equal(logits, wanted)
    for row in range(NUM_ROWS):
        listed.state.clear_row(row)
    left = torch.randn(6, VOCAB_SIZE)
    wanted = left.clone()
    ops.edit_logits(left, rows, positions, history, listed.state.edit_lists.table)
    assert torch.equal(left, wanted)


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": dict.fromkeys(range(EDIT_ENTRIES + 1), 1.0)},
        {"bad_words_token_ids": (tuple(range(9)),)},
        {"logit_bias": {1: 1.0}, "dry_multiplier": 0.8, "dry_sequence_breakers": ()},
    ],
)
def test_lists_that_have_no_room_and_other_options_are_left_to_the_host(fields: dict[str, Any]) -> None:
    state = make_sampler(is_listed=True).state
    state.set_row(0, SamplingParams(**fields), seed=0, num_prompt_tokens=1)
    assert state.mode_of([0]) is SampleMode.HOST
    state.set_row(0, SamplingParams(logit_bias={1: 1.0}), seed=0, num_prompt_tokens=1)
    assert state.mode_of([0]) is SampleMode.EDITED
    state.set_row(0, SamplingParams(logit_bias={1: 1.0}, logprobs=1), seed=0, num_prompt_tokens=1)
    assert state.mode_of([0]) is SampleMode.OBSERVED


def test_the_largest_min_tokens_has_room() -> None:
    state = make_sampler(is_listed=True).state
    state.set_row(0, SamplingParams(min_tokens=2**31), seed=0, num_prompt_tokens=1, stop_token_ids=(2,))
    assert state.mode_of([0]) is SampleMode.EDITED
    logits, zeros, history = torch.zeros(1, VOCAB_SIZE), torch.zeros(1, dtype=torch.int64), torch.zeros(NUM_ROWS, 4)
    assert state.edit_lists is not None
    ops.edit_logits(logits, zeros, zeros, history.int(), state.edit_lists.table)
    assert logits.isinf().nonzero().tolist() == [[0, 2]]
