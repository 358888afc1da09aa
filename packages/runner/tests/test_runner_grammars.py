"""Rows whose output has a form: the tokens are those of a dense pass with the same masks, however steps are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from runner_harness import VOCAB_SIZE, Engine, TinyNetwork, make_request

from quire_interfaces import FinishReason, Request, RequestError, StructuredOutputsParams
from quire_sampling import Sampler, SamplingState, TokenMasks
from quire_spec_decode import NgramDrafter

EOS = 1
NUM_WORDS = -(-VOCAB_SIZE // 32)


class Digits:
    """A grammar over the numbers "period,length": token t may follow n accepted ones if t % period == n % period, and
    an end token from `length` tokens on. Runs of multiples of five are fixed, two tokens each time."""

    allows_all = False

    def __init__(self, text: str, jumps: bool) -> None:
        period, length = map(int, text.split(","))
        self.period, self.length, self.jumps = period, length, jumps
        self.tokens: list[int] = []

    @property
    def is_terminated(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] == EOS

    def _allowed(self) -> set[int]:
        num = len(self.tokens)
        if self.jumps and num % 5 in (2, 3) and num < self.length:
            return {7 + num % 5}
        allowed = {t for t in range(2, VOCAB_SIZE) if t % self.period == num % self.period}
        return allowed | {EOS} if num >= self.length else allowed

    def fill_bitmask(self, bitmask: memoryview) -> None:
        if len(self.tokens) == 13 and self.period == 6:
            raise RequestError("too complex from here on")
        words = bitmask.cast("B").cast("I")
        assert len(words) == NUM_WORDS
        for place in range(NUM_WORDS):
            words[place] = sum(1 << t % 32 for t in self._allowed() if t // 32 == place)

    def accept(self, token_id: int) -> bool:
        if self.is_terminated or token_id not in self._allowed():
            return False
        self.tokens.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        assert num_tokens <= len(self.tokens)
        del self.tokens[len(self.tokens) - num_tokens :]

    def forced_token_ids(self) -> list[int]:
        num = len(self.tokens)
        if not self.jumps or num >= self.length or num % 5 not in (2, 3):
            return []
        return [9, 10][: self.length - num] if num % 5 == 2 else [10]


class DigitsSource:
    def __init__(self, jumps: bool = True) -> None:
        self.jumps = jumps
        self.num_made = 0

    def new_matcher(self, params: StructuredOutputsParams) -> Digits:
        self.num_made += 1
        return Digits(str(params.regex), self.jumps)


def constrained(name: str, prompt: Sequence[int], text: str, **params: Any) -> Request:
    constraint = StructuredOutputsParams(regex=text)
    return make_request(name, prompt, stop=[EOS], structured_outputs=constraint, **{"max_tokens": 24, **params})


def reference(network: TinyNetwork, request: Request, jumps: bool = True) -> list[int]:
    """The request alone, every token from a fresh dense pass over the whole sequence."""
    wanted = request.sampling_params.structured_outputs
    matcher = None if wanted is None else Digits(str(wanted.regex), jumps)
    state = SamplingState(1, VOCAB_SIZE)
    state.set_row(0, request.sampling_params, seed=request.seed, num_prompt_tokens=request.num_prompt_tokens)
    tokens = list(request.prompt_token_ids)
    while len(tokens) < request.num_prompt_tokens + request.max_tokens and tokens[-1] != EOS:
        masks = None
        if matcher is not None:
            bitmask = torch.zeros(1, NUM_WORDS, dtype=torch.int32)
            matcher.fill_bitmask(memoryview(bitmask[0].numpy()))
            masks = TokenMasks([0], bitmask)
        logits = network.dense_logits(tokens)[-1:].clone()
        positions = torch.tensor([len(tokens) - 1])
        sampled = Sampler(state).sample(logits, [0], positions, torch.tensor([tokens]), masks)
        tokens.append(int(sampled.token_ids[0]))
        if matcher is not None:
            assert matcher.accept(tokens[-1])
    return tokens[request.num_prompt_tokens :]


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
        matcher = engine.runner._grammars._matchers.get(request.row)
        matcher_calls.append(None if matcher is None else list(matcher.tokens))
    assert matcher_calls[:8] == [[]] * 8
    assert engine.runner._grammars._buffer.shape[0] == 0, "no mask was made while only chunks were computed"
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
