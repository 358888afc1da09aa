"""Whose fault is whose: one request's, or the whole step's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from runner_harness import VOCAB_SIZE, Engine, TinyNetwork, make_request, reference_tokens

from quire_attention.batch import ForwardBatch
from quire_interfaces import FinishReason, NewRow, SamplingParams, SchedulerOutput


def step(step_id: int, row: int, start: int, num: int, *, samples: bool = True, **more: Any) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=step_id,
        rows=[row],
        request_ids=[f"r{row}"],
        num_computed_tokens=[start],
        num_scheduled_tokens=[num],
        samples=[samples],
        total_num_scheduled_tokens=num,
        **more,
    )


def new_row(row: int, tokens: Sequence[int], blocks: Sequence[int], **params: Any) -> NewRow:
    return NewRow(
        row=row,
        request_id=f"r{row}",
        token_ids=list(tokens),
        num_prompt_tokens=len(tokens),
        num_computed_tokens=0,
        block_ids=(list(blocks),),
        sampling_params=SamplingParams(temperature=0, **params),
        seed=0,
    )


def test_a_processor_that_raises_fails_its_own_request() -> None:
    def broken(token_ids: Sequence[int], num_prompt_tokens: int, logits: Any) -> Any:
        if len(token_ids) - num_prompt_tokens == 3:
            raise ValueError("three is too many")
        return logits

    bad = make_request("bad", range(6), extra_args={"logits_processors": ["broken"]})
    good = make_request("good", range(3, 9))
    engine = Engine(logits_processors={"broken": broken})
    outcomes = engine.run(bad, good)
    engine.close()
    assert outcomes["bad"].finish_reason is FinishReason.ERROR
    assert "three is too many" in (outcomes["bad"].error or "")
    assert len(outcomes["bad"].token_ids) == 3
    assert outcomes["good"].token_ids == reference_tokens(engine.network, good)


def test_parameters_outside_the_vocabulary_fail_their_own_request() -> None:
    bad = make_request("bad", range(6), logit_bias={VOCAB_SIZE: 1})
    good = make_request("good", range(3, 9))
    engine = Engine()
    outcomes = engine.run(bad, good)
    engine.close()
    assert outcomes["bad"].finish_reason is FinishReason.ERROR
    assert str(VOCAB_SIZE) in (outcomes["bad"].error or "")
    assert outcomes["good"].token_ids == reference_tokens(engine.network, good)


@pytest.mark.parametrize("depth", [0, 1])
def test_logits_that_are_nan_fail_their_own_request(depth: int) -> None:
    class Overflows(TinyNetwork):
        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            hidden = super().forward(batch)
            return torch.where((batch.input_ids == 66)[:, None], torch.nan, hidden)

    network = Overflows()
    bad, good = make_request("bad", [1, 2, 66]), make_request("good", [1, 2, 3], bad_words_token_ids=((66,),))
    engine = Engine(network, depth=depth)
    outcomes = engine.run(bad, good)
    assert outcomes["bad"].finish_reason is FinishReason.ERROR
    assert "NaN" in (outcomes["bad"].error or "")
    # The row and the blocks of the failed request are used again.
    later = [make_request(f"later{i}", range(i, i + 20), bad_words_token_ids=((66,),)) for i in range(8)]
    outcomes = engine.run(*later)
    engine.close()
    for request in (good, *later):
        assert outcomes[request.request_id].token_ids == reference_tokens(network, request)


def test_nan_behind_a_rejected_draft_fails_nobody() -> None:
    class Overflows(TinyNetwork):
        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            hidden = super().forward(batch)
            return torch.where((batch.input_ids == 66)[:, None], torch.nan, hidden)

    class Guesses66:
        def propose(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
            return [66] * max_tokens

    request = make_request("r", range(5), bad_words_token_ids=((66,),))
    engine = Engine(Overflows(), num_speculative_tokens=2, drafter=Guesses66())
    outcome = engine.run(request)["r"]
    engine.close()
    assert engine.scheduler.stats().num_draft_tokens_total > 0
    assert outcome.error is None
    assert outcome.token_ids == reference_tokens(engine.network, request)


def test_a_request_that_leaves_itself_no_token_is_told_so() -> None:
    nothing = {"allowed_token_ids": (5,), "bad_words_token_ids": ((5,),)}
    bad, good = make_request("bad", range(6), **nothing), make_request("good", range(3, 9))
    engine = Engine()
    outcomes = engine.run(bad, good)
    engine.close()
    assert outcomes["bad"].finish_reason is FinishReason.ERROR
    assert "no token can be sampled" in (outcomes["bad"].error or "")
    assert outcomes["bad"].error_code == "no_token_left"
    assert outcomes["good"].token_ids == reference_tokens(engine.network, good)


def test_a_step_that_raises_leaves_token_history_as_it_was() -> None:
    broken = False

    def fail(batch: ForwardBatch) -> None:
        if broken:
            raise FloatingPointError("the device had a bad day")

    engine = Engine(TinyNetwork(fail=fail))
    run = engine.runner.run
    prompt = [4, 5, 6]
    request = make_request("r", prompt)
    expected = reference_tokens(engine.network, request)
    first = run(step(0, 0, 0, 3, new_rows=[new_row(0, prompt, [1, 2])]))
    assert first.sampled_token_ids == [expected[:1]]
    before = engine.runner.rows.token_ids[0, :4].tolist()
    broken = True
    with pytest.raises(FloatingPointError, match="bad day"):
        run(step(1, 0, 3, 1))
    assert engine.runner.rows.token_ids[0, :4].tolist() == before == [*prompt, expected[0]]
    assert engine.runner.rows.num_tokens[0] == 4
    broken = False
    # What was planned on top of the failed step cannot run ...
    with pytest.raises(RuntimeError, match="a step before it failed"):
        run(step(2, 0, 4, 1))
    # ... but the same step can be tried again, and others follow.
    assert run(step(3, 0, 3, 1)).sampled_token_ids == [expected[1:2]]
    assert run(step(4, 0, 4, 1)).sampled_token_ids == [expected[2:3]]
    engine.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_discarded_steps_are_computed_anew(depth: int) -> None:
    """The engine's way with a failed step: discard it, and everything planned on top of it, then go on."""
    countdown = 3

    def fail(batch: ForwardBatch) -> None:
        nonlocal countdown
        countdown -= 1
        if countdown == 0:
            raise FloatingPointError("once")

    requests = [make_request(f"r{i}", range(i, i + 5), temperature=0.9, seed=i) for i in range(3)]
    engine = Engine(TinyNetwork(fail=fail), depth=depth)
    engine.add(*requests)
    with pytest.raises(FloatingPointError, match="once"):
        engine.run()
    engine.discard_in_flight()
    outcomes = engine.run()
    engine.close()
    for request in requests:
        assert outcomes[request.request_id].token_ids == reference_tokens(engine.network, request)


def test_too_few_blocks_is_an_error_not_a_silent_write() -> None:
    engine = Engine(block_size=4)
    with pytest.raises(RuntimeError, match="needs 2 blocks but was given 1"):
        engine.runner.run(step(0, 0, 0, 6, new_rows=[new_row(0, range(6), [1])]))
    engine.close()


def test_a_request_longer_than_a_row_fails_alone() -> None:
    engine = Engine(max_model_len=8)
    output = step(0, 0, 0, 9, new_rows=[new_row(0, range(9), [1, 2, 3])])
    result = engine.runner.run(output)
    assert result.sampled_token_ids == [[]]
    assert "9 tokens do not fit a context of 8 tokens" in result.failed_rows[0].message
    assert engine.runner.run(step(1, 1, 0, 2, new_rows=[new_row(1, [1, 2], [1])])).sampled_token_ids[0]
    engine.close()


def test_an_empty_step_frees_rows() -> None:
    engine = Engine()
    run = engine.runner.run
    run(step(0, 3, 0, 2, new_rows=[new_row(3, [1, 2], [5])]))
    empty = SchedulerOutput(
        step_id=1, rows=[], request_ids=[], num_computed_tokens=[], num_scheduled_tokens=[], samples=[], freed_rows=[3]
    )
    assert run(empty).sampled_token_ids == []
    rows = engine.runner.rows
    assert rows.num_tokens[3] == 0
    assert not rows.block_tables[0].table[3].any()
    engine.close()
