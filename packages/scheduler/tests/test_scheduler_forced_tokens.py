"""Tokens that are certain: computed together, without anybody waiting, and never counted as guesses."""

from __future__ import annotations

import pytest

from quire_testkit.conformance.scheduler import expected_of, make_request


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_certain_tokens_save_steps_at_every_depth(make_driver, depth):
    requests = [make_request(f"r{i}", range(i + 3), max_tokens=40, seed=i) for i in range(3)]
    one_by_one = make_driver(depth=depth)
    one_by_one.add(*requests)
    one_by_one.run()
    jumping = make_driver(depth=depth, num_forced_tokens=8)
    jumping.add(*[make_request(f"r{i}", range(i + 3), max_tokens=40, seed=i) for i in range(3)])
    jumping.run()
    for request in requests:
        assert jumping.transcripts[request.request_id].token_ids == expected_of(request)
    # With steps in flight, the first of the certain tokens are on their way already when they are known.
    assert len(jumping.steps) < len(one_by_one.steps) * (0.6, 0.85, 0.95)[depth]
    assert any(step.forced_rows for step in jumping.steps)


def test_they_are_no_guesses(make_driver):
    driver = make_driver(num_forced_tokens=6)
    driver.add(make_request("r", [1, 2, 3], max_tokens=30))
    driver.run()
    stats = driver.scheduler.stats()
    assert (stats.num_drafts_total, stats.num_draft_tokens_total, stats.num_accepted_tokens_total) == (0, 0, 0)
    assert stats.num_generation_tokens_total == 30


def test_guesses_and_certain_tokens_together(make_driver):
    driver = make_driver(num_speculative_tokens=3, draft_accuracy=0.5, num_forced_tokens=6)
    requests = [make_request(f"r{i}", range(i + 1), max_tokens=25, seed=i) for i in range(5)]
    driver.add(*requests)
    driver.run()
    for request in requests:
        assert driver.transcripts[request.request_id].token_ids == expected_of(request)
    stats = driver.scheduler.stats()
    assert 0 < stats.num_accepted_tokens_total < stats.num_draft_tokens_total


def test_they_stay_within_budget_and_length(make_driver):
    driver = make_driver(num_forced_tokens=20, max_num_batched_tokens=5, depth=1)
    requests = [make_request(f"r{i}", range(4), max_tokens=7, seed=i) for i in range(4)]
    driver.add(*requests)
    driver.run()
    assert max(step.total_num_scheduled_tokens for step in driver.steps) <= 5
    for request in requests:
        assert driver.transcripts[request.request_id].token_ids == expected_of(request)


def test_nobody_is_preempted_for_them(make_driver):
    driver = make_driver(num_blocks=4, num_forced_tokens=12)
    requests = [make_request(f"r{i}", range(4), max_tokens=5, seed=i) for i in range(2)]
    driver.add(*requests)
    driver.run()
    assert driver.scheduler.stats().num_preemptions_total == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_a_stop_token_among_them_ends_the_output(make_driver, depth):
    free = make_request("free", [5, 6], max_tokens=30)
    for place in range(1, 20):
        request = make_request("r", [5, 6], max_tokens=30, stop_token_ids=[expected_of(free)[place]])
        driver = make_driver(num_forced_tokens=9, depth=depth)
        driver.add(request)
        driver.run()
        assert driver.transcripts["r"].token_ids == expected_of(request)
        assert driver.runner.num_filled_rows == 0


def test_blocks_of_certain_tokens_are_remembered(make_driver):
    driver = make_driver(num_forced_tokens=9, depth=1, prefix_cache=True)
    first = make_request("first", range(6), max_tokens=30)
    driver.add(first)
    driver.run()
    known = [*first.prompt_token_ids, *expected_of(first)]
    again = make_request("again", known, max_tokens=1)
    driver.add(again)
    driver.run()
    assert again.num_cached_tokens >= len(known) - 8
