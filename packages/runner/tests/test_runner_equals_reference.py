"""Whatever shares the step, in whatever pieces, each request gets the tokens it gets alone."""

from __future__ import annotations

import random

import pytest
from runner_harness import FULL, HYBRID, VOCAB_SIZE, Engine, TinyNetwork, make_request, reference_tokens

from quire_interfaces import Request


def mixed_requests(seed: int, count: int = 8) -> list[Request]:
    """Greedy and drawn, short and long, some with a common beginning, some with penalties and stop tokens."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(21)]
    requests = []
    for i in range(count):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 2, 5, 17, 40]))]
        if rng.random() < 0.4:
            prompt = shared[: rng.randrange(8, 22)] + prompt
        params = {"max_tokens": rng.choice([1, 3, 12, 20]), "seed": rng.randrange(2**32)}
        if rng.random() < 0.6:
            params |= {
                "temperature": rng.choice([0.7, 1.3]),
                "top_k": rng.choice([0, 5]),
                "top_p": rng.choice([1.0, 0.9]),
            }
        if rng.random() < 0.4:
            params |= {"repetition_penalty": 1.3, "frequency_penalty": 0.5}
        if rng.random() < 0.4:
            params |= {"stop": rng.sample(range(VOCAB_SIZE), 4), "min_tokens": 1}
        requests.append(make_request(f"r{i}", prompt, **params))
    return requests


def check(engine: Engine, requests: list[Request]) -> None:
    try:
        outcomes = engine.run(*requests)
    finally:
        engine.close()
    for request in requests:
        outcome = outcomes[request.request_id]
        assert outcome.error is None
        assert outcome.token_ids == reference_tokens(engine.network, request), request.request_id


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("windows", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_chunk_sizes(budget: int, windows: tuple[int | None, ...], depth: int) -> None:
    engine = Engine(TinyNetwork(windows), max_num_batched_tokens=budget, depth=depth)
    check(engine, mixed_requests(budget, count=6))


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_block_sizes(block_size: int, depth: int) -> None:
    engine = Engine(TinyNetwork(HYBRID), block_size=block_size, num_blocks=600, depth=depth)
    check(engine, mixed_requests(block_size))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("windows", [FULL, HYBRID], ids=["full", "hybrid"])
def test_preemption_and_resume(windows: tuple[int | None, ...], depth: int) -> None:
    requests = [make_request(f"r{i}", range(i, i + 12), max_tokens=20, temperature=1.0, seed=i) for i in range(6)]
    engine = Engine(TinyNetwork(windows), num_blocks=24 * (2 if windows is HYBRID else 1), depth=depth)
    check(engine, requests)
    assert engine.scheduler.stats().num_preemptions_total > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_rows_are_used_again(depth: int) -> None:
    engine = Engine(max_num_seqs=2, depth=depth)
    check(engine, mixed_requests(5, count=9))


@pytest.mark.parametrize("depth", [0, 1])
def test_prefix_cache_hit(depth: int) -> None:
    engine = Engine(TinyNetwork(HYBRID), depth=depth)
    prompt = [3 * i % VOCAB_SIZE for i in range(30)]
    first = make_request("first", prompt)
    assert engine.run(first)["first"].token_ids == reference_tokens(engine.network, first)
    check(engine, [make_request("second", [*prompt, 1]), make_request("third", prompt[:20], max_tokens=2)])
    assert engine.scheduler.stats().prefix_cache_hit_tokens_total > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_arrive_and_leave_at_any_time(depth: int) -> None:
    rng = random.Random(depth)
    engine = Engine(max_num_seqs=4, num_blocks=60, depth=depth)
    requests = mixed_requests(9, count=16)
    waiting, aborted = list(requests), set()
    while waiting or engine.scheduler.has_requests():
        if waiting and rng.random() < 0.4:
            engine.add(waiting.pop())
        alive = [r for r in requests if r.request_id in engine.outcomes and not r.is_finished]
        if alive and rng.random() < 0.08:
            aborted.update(engine.scheduler.abort_requests([rng.choice(alive).request_id]))
        engine.step()
    while engine.step():
        pass
    engine.close()
    engine.manager.check_integrity()
    assert aborted
    for request in requests:
        tokens, expected = engine.outcomes[request.request_id].token_ids, reference_tokens(engine.network, request)
        assert tokens == (expected[: len(tokens)] if request.request_id in aborted else expected)


def test_context_is_filled_to_the_last_token() -> None:
    engine = Engine(max_model_len=20)
    request = make_request("r", range(12), max_tokens=8)
    check(engine, [request])
    assert len(request.output_token_ids) == 8
