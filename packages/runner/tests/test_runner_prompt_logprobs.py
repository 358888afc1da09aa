"""Prompt log probabilities, whole or in chunks, beside others, after preemption."""

from __future__ import annotations

import pytest
import torch
from runner_harness import VOCAB_SIZE, Engine, Outcome, TinyNetwork, make_request

from quire_interfaces import Request


def check(network: TinyNetwork, request: Request, outcome: Outcome) -> None:
    prompt, k = request.prompt_token_ids, request.sampling_params.prompt_logprobs
    assert k is not None
    expected = network.dense_logits(prompt).double().log_softmax(-1)
    assert len(outcome.prompt_logprobs) == len(prompt) - 1
    for position, found in enumerate(outcome.prompt_logprobs, start=1):
        row = expected[position - 1]
        assert found.token_ids[0] == prompt[position]
        assert found.logprobs[0] == pytest.approx(float(row[prompt[position]]), abs=1e-4)
        assert found.rank == 1 + int((row > row[prompt[position]]).sum())
        best = row.topk(k)
        assert found.token_ids[1:] == best.indices.tolist()
        assert found.logprobs[1:] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_chunks(budget: int, depth: int) -> None:
    requests = [
        make_request("asks", torch.arange(30).tolist(), prompt_logprobs=3, max_tokens=2),
        make_request("other", [5, 6, 7], max_tokens=4),
        make_request("chosen-only", [8, 1, 8, 2], prompt_logprobs=0, max_tokens=2),
    ]
    engine = Engine(max_num_batched_tokens=budget, depth=depth)
    outcomes = engine.run(*requests)
    engine.close()
    check(engine.network, requests[0], outcomes["asks"])
    check(engine.network, requests[2], outcomes["chosen-only"])
    assert outcomes["other"].prompt_logprobs == []


def test_prompt_of_one_token_has_none() -> None:
    engine = Engine()
    outcome = engine.run(make_request("r", [4], prompt_logprobs=2, max_tokens=2))["r"]
    engine.close()
    assert outcome.prompt_logprobs == []
    assert len(outcome.token_ids) == 2


def test_every_position_is_computed_although_the_prefix_is_cached() -> None:
    engine = Engine()
    prompt = [i % VOCAB_SIZE for i in range(40)]
    engine.run(make_request("warm", prompt, max_tokens=1))
    request = make_request("r", prompt, prompt_logprobs=1, max_tokens=1)
    outcome = engine.run(request)["r"]
    engine.close()
    check(engine.network, request, outcome)


def test_preempted_requests_report_each_position_once() -> None:
    requests = [
        make_request(f"r{i}", range(i, i + 12), max_tokens=20, prompt_logprobs=1, temperature=1.0, seed=i)
        for i in range(6)
    ]
    engine = Engine(num_blocks=24, max_num_batched_tokens=16)
    outcomes = engine.run(*requests)
    engine.close()
    assert engine.scheduler.stats().num_preemptions_total > 0
    for request in requests:
        check(engine.network, request, outcomes[request.request_id])
