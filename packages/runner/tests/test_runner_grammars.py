"""Rows whose output has a form: the tokens are those of a dense pass with the same masks, however steps are made."""

from __future__ import annotations

from typing import Any

import pytest
from runner_grammar_cases import EOS, DigitsSource, constrained, reference
from runner_harness import Engine, make_request

from quire_interfaces import FinishReason, Request
from quire_spec_decode import NgramDrafter


def crowd(**params: Any) -> list[Request]:
    texts = ["2,9", "3,4", "5,12", "7,0"]
    requests = [constrained(f"c{i}", range(3, 4 + 3 * i), text, seed=i, **params) for i, text in enumerate(texts)]
    return [*requests, make_request("free", [4, 5, 6], max_tokens=20, seed=9, stop=[EOS], **params)]


WAYS: dict[str, dict[str, Any]] = {
    "depth 0": {},
    "depth 1": {"depth": 1},
    "n-grams": {"drafter": NgramDrafter(1, 3), "num_speculative_tokens": 4},
    "n-grams, depth 1": {"drafter": NgramDrafter(1, 3), "num_speculative_tokens": 4, "depth": 1},
    "chunks of two": {"max_num_batched_tokens": 2},
    "two rows": {"max_num_seqs": 2, "depth": 1},
    "preemptions": {"num_blocks": 16, "depth": 1},
}


@pytest.mark.parametrize("jumps", [False, True])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.5}, {"temperature": 0.7, "top_k": 5, "logprobs": 2}])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_tokens_are_those_of_a_dense_pass(way: dict[str, Any], params: dict[str, Any], jumps: bool) -> None:
    engine = Engine(grammars=DigitsSource(jumps), **way)
    requests = crowd(**params)
    outcomes = engine.run(*requests)
    engine.close()
    if way is WAYS["preemptions"]:
        assert engine.scheduler.stats().num_preemptions_total > 0
    for request in requests:
        outcome = outcomes[request.request_id]
        assert outcome.error is None
        assert outcome.token_ids == reference(engine.network, request, jumps), request.request_id
        if "logprobs" in params:
            assert [each.token_ids[0] for each in outcome.logprobs] == outcome.token_ids


def test_fixed_tokens_take_fewer_steps_and_no_logits() -> None:
    steps, rows = {}, {}
    for jumps in (False, True):
        seen: list[int] = []
        engine = Engine(
            grammars=DigitsSource(jumps),
            on_logits=lambda step_rows, positions, logits, seen=seen: seen.extend(step_rows),
        )
        engine.run(constrained("r", [3, 4, 5], "2,20", max_tokens=21))
        steps[jumps], rows[jumps] = engine.num_steps, len(seen)
    assert steps[True] <= steps[False] * 0.7
    assert rows[True] == rows[False] - 8, "the eight fixed tokens were not sampled"


def test_prompts_in_chunks_need_no_mask() -> None:
    source = DigitsSource()
    engine = Engine(grammars=source, max_num_batched_tokens=4)
    request = constrained("r", range(2, 40), "2,3", max_tokens=4)
    engine.add(request)
    matcher_calls = []
    for _ in range(8):
        engine.step()
        matcher = engine.runner.rows.grammars._matchers.get(request.row)
        matcher_calls.append(None if matcher is None else list(matcher.tokens))
    assert matcher_calls[:8] == [[]] * 8
    assert engine.runner.rows.grammars._buffer.shape[0] == 0, "no mask was made while only chunks were computed"
    engine.run()
    assert engine.outcomes["r"].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_grammar_that_fails_half_way_fails_alone(depth: int) -> None:
    engine = Engine(grammars=DigitsSource(jumps=False), depth=depth)
    good, bad = constrained("good", [3, 4], "3,9"), constrained("bad", [5, 6], "6,20")
    outcomes = engine.run(good, bad)
    engine.close()
    assert outcomes["bad"].finish_reason == FinishReason.ERROR
    assert len(outcomes["bad"].token_ids) == 13
    assert outcomes["good"].token_ids == reference(engine.network, good, jumps=False)


def test_a_grammar_that_cannot_be_made_fails_its_request() -> None:
    engine = Engine(grammars=DigitsSource())
    outcomes = engine.run(constrained("bad", [3], "nonsense"), make_request("good", [3], stop=[EOS]))
    assert outcomes["bad"].finish_reason == FinishReason.ERROR
    assert outcomes["good"].error is None


def test_without_a_source_such_requests_fail_alone() -> None:
    engine = Engine()
    outcomes = engine.run(constrained("bad", [3], "2,3"), make_request("good", [3], stop=[EOS]))
    assert outcomes["bad"].finish_reason == FinishReason.ERROR
    assert outcomes["good"].finish_reason != FinishReason.ERROR


def test_a_request_comes_back_to_where_its_grammar_was() -> None:
    source = DigitsSource()
    engine = Engine(grammars=source)
    request = constrained("r", [3, 4, 5], "5,15")
    engine.add(request)
    for _ in range(5):
        engine.step()
    assert engine.scheduler.reset_prefix_cache(preempt_running=True)
    outcomes = engine.run()
    assert source.num_made == 2
    assert outcomes["r"].token_ids == reference(engine.network, request)
