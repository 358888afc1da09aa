"""Only what was computed, of tokens that are known, is remembered: the next request must not read guesses.

The runner's KV check finds a wrong block: it compares what is in it with what the request's own tokens give.
"""

from __future__ import annotations

import pytest

from quire_testkit.conformance.scheduler import expected_of, make_request


@pytest.mark.parametrize("num_prompt", range(1, 9))
def test_a_rejected_draft_at_a_block_border(make_driver, num_prompt):
    prompt = list(range(num_prompt))
    output = expected_of(make_request("free", prompt))
    driver = make_driver(prefix_cache=True, num_speculative_tokens=3, draft_accuracy=0.0)
    driver.add(make_request("first", prompt, stop_token_ids=[output[2]]))
    driver.run()
    # The stop token itself was never computed; a rejected draft stood in its slot.
    following = make_request("second", [*prompt, *output[:3], 5, 6])
    driver.add(following)
    driver.run()
    assert driver.transcripts["second"].token_ids == expected_of(following)
    assert driver.transcripts["second"].num_cached_tokens == (num_prompt + 2) // 4 * 4


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_token_that_was_sampled_last_is_not_remembered(make_driver, depth):
    prompt = list(range(5))
    driver = make_driver(prefix_cache=True, depth=depth)
    driver.add(make_request("first", prompt, max_tokens=3))
    driver.run()
    following = make_request("second", [*prompt, *driver.transcripts["first"].token_ids, 5])
    driver.add(following)
    driver.run()
    assert driver.transcripts["second"].token_ids == expected_of(following)
    assert driver.transcripts["second"].num_cached_tokens == 4


def test_a_late_result_says_nothing_of_new_blocks(make_driver):
    driver = make_driver(prefix_cache=True, depth=2, policy="priority", max_num_batched_tokens=8)
    late = make_request("late", range(20), priority=1)
    driver.add(late)
    driver.step()
    assert driver.steps[-1].num_scheduled_tokens == [8]
    assert driver.scheduler.reset_prefix_cache(preempt_running=True)
    driver.add(make_request("first", range(50, 55), priority=0))
    driver.step()
    assert driver.steps[-1].num_scheduled_tokens == [5, 3]
    driver.land()  # of 8 tokens in blocks that are gone
    twin = make_request("twin", range(20), priority=0)
    driver.add(twin)
    driver.run()
    assert driver.transcripts["twin"].token_ids == expected_of(twin)
    assert driver.transcripts["late"].token_ids == expected_of(late)


def test_a_step_that_failed_is_not_remembered(make_driver):
    driver = make_driver(prefix_cache=True)
    driver.add(make_request("a", range(12)))
    driver.runner.raise_on.add("a")
    output = driver.scheduler.schedule()
    with pytest.raises(RuntimeError, match="broke the step"):
        driver.runner.execute(output)
    driver.scheduler.discard_step(output)
    driver.scheduler.abort_requests(["a"])
    twin = make_request("b", range(12))
    driver.add(twin)
    driver.run()
    assert driver.transcripts["b"].num_cached_tokens == 0
    assert driver.transcripts["b"].token_ids == expected_of(twin)


def test_prompt_tokens_are_counted_by_where_they_came_from(make_driver):
    driver = make_driver(prefix_cache=True)
    prompt = list(range(18))
    driver.add(make_request("first", prompt, max_tokens=3))
    driver.run()
    driver.add(make_request("second", [*prompt, 30, 31], max_tokens=3), make_request("other", [50, 51], max_tokens=3))
    driver.run()
    driver.add(make_request("gone", prompt, max_tokens=3))
    driver.scheduler.abort_requests(["gone"])
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.num_prompt_tokens_total == 18 + 20 + 2, "of requests that reached an output token"
    assert stats.num_cached_prompt_tokens_total == driver.transcripts["second"].num_cached_tokens == 16


def test_there_is_work_when_a_waiting_request_needs_fewer_blocks_than_before(make_driver):
    driver = make_driver(prefix_cache=True, num_blocks=9, depth=2)
    driver.add(make_request("long", range(28), max_tokens=2))
    driver.step()
    short = make_request("short", range(8), max_tokens=1, arrival_time_s=1.0)
    driver.add(short)
    driver.step()
    assert driver.scheduler.waiting_reasons() == {"capacity": 1}, "it needs two blocks, and one is free"
    assert not driver.scheduler.has_work()
    driver.land()  # the prompt they share is in the cache now
    assert driver.scheduler.has_work()
    assert driver.step()
    assert driver.scheduler.num_requests() == (2, 0)
    driver.run()
    assert driver.transcripts["short"].token_ids == expected_of(short)
