"""Draft tokens change how many steps a request takes, never its tokens."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

import pytest
from runner_harness import HYBRID, VOCAB_SIZE, Engine, TinyNetwork, make_request, reference_tokens

from quire_interfaces import Request
from quire_spec_decode import NgramDrafter, SuffixDrafter


class Oracle:
    """Drafts the true continuation of known sequences, with some tokens spoilt."""

    def __init__(self, sequences: Sequence[Sequence[int]], spoil: float) -> None:
        self.sequences = [list(sequence) for sequence in sequences]
        self.spoil = spoil
        self.num_proposals = 0

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        known = list(token_ids)
        rng = random.Random(str(known))
        self.num_proposals += 1
        for sequence in self.sequences:
            if sequence[: len(known)] == known:
                drafts = sequence[len(known) : len(known) + max_tokens]
                return [(t + 1) % VOCAB_SIZE if rng.random() < self.spoil else t for t in drafts]
        return []


def repetitive_requests(**params: Any) -> list[Request]:
    return [
        make_request(f"r{i}", [i, 5, 9, 11] * 5 + [i, 5], max_tokens=24, logit_bias={5: 2, 9: 2, 11: 2}, **params)
        for i in range(5)
    ]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_ngram_drafting_gives_the_same_tokens(temperature: float, depth: int) -> None:
    requests = repetitive_requests(temperature=temperature, seed=11, repetition_penalty=1.05)
    engine = Engine(num_speculative_tokens=4, drafter=NgramDrafter(1, 3), depth=depth)
    outcomes = engine.run(*requests)
    engine.close()
    assert engine.scheduler.stats().num_draft_tokens_total > 0
    for request in requests:
        assert outcomes[request.request_id].token_ids == reference_tokens(engine.network, request)


@pytest.mark.parametrize("spoil", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("windows", [(None, None), HYBRID], ids=["full", "hybrid"])
def test_right_and_wrong_drafts(windows: tuple[int | None, ...], spoil: float) -> None:
    network = TinyNetwork(windows)
    params = {"frequency_penalty": 0.7, "top_k": 9, "min_tokens": 3, "stop": (1, 2, 3, 4)}
    requests = [
        make_request(f"r{i}", range(i, i + 9), max_tokens=20, temperature=0.9 * (i % 2), seed=i, **params)
        for i in range(5)
    ]
    expected = {r.request_id: reference_tokens(network, r) for r in requests}
    oracle = Oracle([[*r.prompt_token_ids, *expected[r.request_id]] for r in requests], spoil)
    engine = Engine(network, num_speculative_tokens=3, drafter=oracle, num_blocks=100, block_size=2)
    outcomes = engine.run(*requests)
    engine.close()
    assert {name: outcome.token_ids for name, outcome in outcomes.items()} == expected
    stats = engine.scheduler.stats()
    assert stats.num_draft_tokens_total > 0
    assert (stats.num_accepted_tokens_total > 0) == (spoil < 1)
    if spoil == 0:
        longest = max(map(len, expected.values()))
        assert engine.num_steps < longest, "accepted drafts must save steps"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_suffix_drafting_gives_the_same_tokens_and_learns_from_others(temperature: float) -> None:
    requests = [make_request(f"r{i}", [5, 9, 2, 7] * 3, max_tokens=24, temperature=temperature) for i in range(3)]
    drafter = SuffixDrafter(max_tree_depth=6, max_spec_factor=2.0)
    engine = Engine(num_speculative_tokens=4, drafter=drafter, num_blocks=14, max_num_seqs=2)
    expected = reference_tokens(engine.network, requests[0])
    num_steps = []
    for request in requests:  # the same output again: it was seen in the first one
        engine.run(request)
        num_steps.append(engine.num_steps - sum(num_steps))
    engine.close()
    assert [engine.outcomes[r.request_id].token_ids for r in requests] == [expected] * 3
    assert num_steps[1] < num_steps[0]


def test_suffix_drafting_with_preemption() -> None:
    requests = [make_request(f"r{i}", [i, 7] * 6, max_tokens=20, temperature=0.6, seed=i) for i in range(6)]
    engine = Engine(num_speculative_tokens=3, drafter=SuffixDrafter(), num_blocks=24)
    outcomes = engine.run(*requests)
    engine.close()
    assert engine.scheduler.stats().num_preemptions_total > 0
    for request in requests:
        assert outcomes[request.request_id].token_ids == reference_tokens(engine.network, request)


def test_drafts_with_preemption() -> None:
    requests = [make_request(f"r{i}", [i, 7] * 6, max_tokens=20, temperature=0.6, seed=i) for i in range(6)]
    engine = Engine(num_speculative_tokens=3, drafter=NgramDrafter(1, 2), num_blocks=24)
    outcomes = engine.run(*requests)
    engine.close()
    assert engine.scheduler.stats().num_preemptions_total > 0
    for request in requests:
        assert outcomes[request.request_id].token_ids == reference_tokens(engine.network, request)


def test_logprobs_belong_to_the_accepted_tokens() -> None:
    def run(**args: Any) -> Any:
        engine = Engine(**args)
        outcome = engine.run(make_request("r", [4, 8] * 6, max_tokens=16, logprobs=2))["r"]
        engine.close()
        return outcome, engine

    plain, _ = run()
    network = TinyNetwork()
    oracle = Oracle([[4, 8] * 6 + plain.token_ids], 0.3)
    drafted, engine = run(network=network, num_speculative_tokens=3, drafter=oracle)
    assert engine.scheduler.stats().num_accepted_tokens_total > 0
    assert drafted.token_ids == plain.token_ids
    assert [entry.token_ids for entry in drafted.logprobs] == [entry.token_ids for entry in plain.logprobs]
    assert [entry.token_ids[0] for entry in drafted.logprobs] == drafted.token_ids
    for ours, theirs in zip(drafted.logprobs, plain.logprobs, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-6)


def test_drafts_stop_at_the_end_of_the_context() -> None:
    request = make_request("r", [3, 6] * 5, max_tokens=6)
    engine = Engine(max_model_len=16, num_speculative_tokens=8, drafter=NgramDrafter(1, 3))
    outcome = engine.run(request)["r"]
    engine.close()
    assert outcome.token_ids == reference_tokens(engine.network, request)


def test_a_drafter_that_raises_costs_no_request(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def propose(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
            raise ZeroDivisionError("no idea")

    request = make_request("r", range(5))
    engine = Engine(num_speculative_tokens=2, drafter=Broken())
    with caplog.at_level(logging.ERROR):
        outcome = engine.run(request)["r"]
    engine.close()
    assert outcome.token_ids == reference_tokens(engine.network, request)
    assert "goes on without drafts" in caplog.text


def test_drafters_get_a_plain_sequence_of_the_known_tokens() -> None:
    seen: list[list[int]] = []

    class Looks:
        def propose(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
            assert isinstance(token_ids, Sequence)
            assert all(type(token) is int for token in token_ids)
            assert 1 <= max_tokens <= 2
            seen.append(list(token_ids))
            return []

    engine = Engine(num_speculative_tokens=2, drafter=Looks())
    request = make_request("r", range(5))
    tokens = [*request.prompt_token_ids, *engine.run(request)["r"].token_ids]
    engine.close()
    assert seen == [tokens[:n] for n in range(6, len(tokens) + 1)]


def test_requests_with_custom_processors_get_no_drafts() -> None:
    def reverse(token_ids: Sequence[int], num_prompt_tokens: int, logits: Any) -> Any:
        return logits.flip(0)

    oracle = Oracle([], 0)
    engine = Engine(num_speculative_tokens=2, drafter=oracle, logits_processors={"reverse": reverse})
    engine.run(make_request("r", [1, 2] * 4, extra_args={"logits_processors": ["reverse"]}))
    assert oracle.num_proposals == 0
    engine.run(make_request("plain", [1, 2] * 4))
    engine.close()
    assert oracle.num_proposals > 0
