"""Preemption by recompute: who loses, what it costs, and that everybody ends all the same."""

from __future__ import annotations

import pytest

from quire_interfaces import FinishReason, RequestStatus
from quire_testkit.conformance.scheduler import expected_of, make_request


def test_the_last_in_the_order_is_preempted(make_driver):
    # 6 blocks of 4: two requests of 8 + 12 tokens do not fit to their ends.
    driver = make_driver(num_blocks=6)
    requests = [make_request(f"r{i}", range(i, i + 8), max_tokens=12, seed=i) for i in range(2)]
    driver.add(*requests)
    driver.run()
    assert [request.num_preemptions for request in requests] == [0, 1]
    for request in requests:
        assert driver.transcripts[request.request_id].token_ids == expected_of(request)
    assert driver.scheduler.stats().num_preemptions_total == 1


def test_the_lowest_priority_is_preempted(make_driver):
    driver = make_driver(num_blocks=6, policy="priority")
    requests = [make_request(f"r{i}", range(i, i + 8), max_tokens=12, seed=i, priority=-i) for i in range(2)]
    driver.add(*requests)
    driver.run()
    assert [request.num_preemptions for request in requests] == [1, 0]


def test_nobody_is_preempted_for_a_waiting_request(make_driver):
    driver = make_driver(num_blocks=5, policy="priority")
    driver.add(make_request("low", range(12), max_tokens=8, priority=1))
    driver.step()
    driver.add(make_request("high", range(12), max_tokens=2, priority=0))
    driver.run()
    assert driver.scheduler.stats().num_preemptions_total == 0
    assert driver.transcripts["high"].finish_reason == FinishReason.LENGTH


def test_a_preempted_request_waits_for_more_blocks_than_it_had(make_driver):
    """Else it would compute its long prompt chunk by chunk, only to lose it at the same place, again and again."""
    driver = make_driver(num_blocks=12, max_num_batched_tokens=8)
    driver.add(make_request("old", range(16), max_tokens=32), make_request("young", range(16), max_tokens=32, seed=1))
    driver.run()
    assert driver.transcripts["young"].finish_reason == FinishReason.LENGTH
    assert driver.scheduler.stats().num_preemptions_total == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_in_flight_survive_preemption(make_driver, depth):
    driver = make_driver(num_blocks=6, depth=depth)
    requests = [make_request(f"r{i}", range(i, i + 8), max_tokens=12, seed=i) for i in range(3)]
    driver.add(*requests)
    reasons = set()
    while driver.step():
        reasons |= driver.scheduler.waiting_reasons().keys()
    for request in requests:
        assert driver.transcripts[request.request_id].token_ids == expected_of(request)
    assert driver.scheduler.stats().num_preemptions_total > 0
    # At depth 1 the token has landed when the driver looks.
    assert reasons == ({"tokens_in_flight", "capacity"} if depth == 2 else {"capacity"})


def test_no_row_is_filled_in_the_step_of_a_preemption(make_driver):
    """The blocks that a preemption frees are for the one that needed them, not for whoever waits."""
    driver = make_driver(num_blocks=6, max_num_seqs=2, policy="priority")
    requests = [make_request(f"r{i}", range(i, i + 8), max_tokens=12, seed=i, priority=2 * i) for i in range(2)]
    driver.add(*requests)
    driver.step()
    driver.add(make_request("small", [1], max_tokens=2, priority=1))  # before the one that will be preempted
    while not driver.scheduler.stats().num_preemptions_total:
        assert driver.step()
    assert driver.steps[-1].new_rows == []
    driver.run()
    assert all(transcript.finish_reason == "length" for transcript in driver.transcripts.values())


def test_prompt_logprobs_are_told_once(make_driver):
    driver = make_driver(num_blocks=6, prefix_cache=True, max_num_batched_tokens=5)
    requests = [make_request(f"r{i}", range(i, i + 8), max_tokens=12, seed=i, prompt_logprobs=0) for i in range(2)]
    driver.add(*requests)
    driver.run()
    assert driver.scheduler.stats().num_preemptions_total > 0
    for request in requests:
        transcript = driver.transcripts[request.request_id]
        assert [entry.token_ids[0] for entry in transcript.prompt_logprobs] == request.prompt_token_ids[1:]
        assert transcript.num_cached_tokens == 0


def test_the_policy_orders_the_queue(make_driver):
    driver = make_driver(max_num_seqs=1, policy="priority")
    driver.add(*[make_request(f"r{i}", [i], priority=p, max_tokens=2) for i, p in enumerate([3, 1, 2, 1, 0])])
    driver.run()
    order = [new.request_id for step in driver.steps for new in step.new_rows]
    assert order == ["r4", "r1", "r3", "r2", "r0"]


def test_no_work_while_everything_is_in_flight_or_out_of_blocks(make_driver):
    driver = make_driver(num_blocks=3, num_speculative_tokens=1)
    driver.add(make_request("a", range(8), max_tokens=4), make_request("b", range(8), max_tokens=4, seed=1))
    output = driver.scheduler.schedule()
    assert output.request_ids == ["a"]
    assert not driver.scheduler.has_work()
    assert driver.scheduler.schedule() is None
    driver._flying.append((output, driver.runner.execute(output)))
    driver.land()
    assert driver.scheduler.has_work()
    driver.run()
    assert all(transcript.finish_reason == FinishReason.LENGTH for transcript in driver.transcripts.values())


@pytest.mark.parametrize("kind", [{"num_forced_tokens": 6}, {"num_speculative_tokens": 4, "draft_accuracy": 1.0}])
def test_drafts_do_not_outlive_a_preemption(make_driver, kind):
    """They follow tokens whose computation is gone; those that are certain would not even be verified."""
    driver = make_driver(prefix_cache=True, **kind)
    request = make_request("r", range(8), max_tokens=30)
    driver.add(request)
    while not request.draft_token_ids:
        driver.step()
    assert driver.scheduler.reset_prefix_cache(preempt_running=True)
    assert request.status == RequestStatus.PREEMPTED
    assert request.draft_token_ids == []
    driver.run()
    assert driver.transcripts["r"].token_ids == expected_of(request)
