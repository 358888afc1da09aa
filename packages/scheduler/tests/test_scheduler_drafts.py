"""Draft tokens are scheduled tokens: fewer steps, the same output."""

from __future__ import annotations

import pytest

from quire_testkit.conformance.scheduler import expected_of, make_request


@pytest.mark.parametrize("depth", [0, 1])
def test_right_drafts_save_steps(make_driver, depth):
    request = make_request("a", range(5), max_tokens=21)
    driver = make_driver(num_speculative_tokens=4, draft_accuracy=1.0, depth=depth)
    driver.add(request)
    driver.run()
    assert driver.transcripts["a"].token_ids == expected_of(request)
    # One token from the prompt, then five per step; the last step only frees the row.
    assert len([step for step in driver.steps if step.rows]) == 1 + 4
    stats = driver.scheduler.stats()
    assert (stats.num_drafts_total, stats.num_draft_tokens_total, stats.num_accepted_tokens_total) == (4, 16, 16)
    assert stats.num_accepted_tokens_per_pos_total == [4, 4, 4, 4]


def test_wrong_drafts_cost_no_tokens(make_driver):
    request = make_request("a", range(5), max_tokens=10)
    driver = make_driver(num_speculative_tokens=3, draft_accuracy=0.0)
    driver.add(request)
    driver.run()
    assert driver.transcripts["a"].token_ids == expected_of(request)
    assert driver.scheduler.stats().num_accepted_tokens_total == 0
    assert driver.scheduler.stats().num_draft_tokens_total > 0


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 0.9])
def test_acceptance_is_counted_by_position(make_driver, accuracy):
    driver = make_driver(num_speculative_tokens=5, draft_accuracy=accuracy)
    driver.add(*[make_request(f"r{i}", [i, 7], max_tokens=40, seed=i) for i in range(6)])
    before = driver.scheduler.stats()
    driver.run()
    stats = driver.scheduler.stats()
    by_position = stats.num_accepted_tokens_per_pos_total
    assert before.num_accepted_tokens_per_pos_total == [0] * 5, "statistics are a copy"
    assert sum(by_position) == stats.num_accepted_tokens_total
    assert by_position == sorted(by_position, reverse=True), "a draft is accepted from its beginning on"
    assert by_position[0] <= stats.num_drafts_total
    assert (by_position[0] > 0) == (accuracy > 0)


def test_drafts_stop_short_of_the_end(make_driver):
    driver = make_driver(num_speculative_tokens=8, draft_accuracy=1.0)
    driver.add(make_request("a", range(5), max_tokens=4))
    driver.run()
    assert [step.num_scheduled_tokens for step in driver.steps if step.rows] == [[5], [3]]


def test_a_stop_token_among_the_drafts_drops_the_rest(make_driver):
    free_running = make_request("free", range(5), max_tokens=12)
    stop = expected_of(free_running)[3]
    request = make_request("a", range(5), max_tokens=12, stop_token_ids=[stop], logprobs=0)
    driver = make_driver(num_speculative_tokens=6, draft_accuracy=1.0)
    driver.add(request)
    driver.run()
    transcript = driver.transcripts["a"]
    assert transcript.token_ids == expected_of(request)
    assert [entry.token_ids[0] for entry in transcript.logprobs] == transcript.token_ids
    assert transcript.stop_token_id == stop


def test_drafts_share_the_budget(make_driver):
    driver = make_driver(num_speculative_tokens=4, draft_accuracy=1.0, max_num_batched_tokens=6)
    requests = [make_request(f"r{i}", [i], max_tokens=20, seed=i) for i in range(3)]
    driver.add(*requests)
    driver.run()
    assert max(step.total_num_scheduled_tokens for step in driver.steps) == 6
    for request in requests:
        assert driver.transcripts[request.request_id].token_ids == expected_of(request)


def test_nobody_is_preempted_for_drafts(make_driver):
    # The blocks are just enough for both without drafts.
    driver = make_driver(num_blocks=4, num_speculative_tokens=7, draft_accuracy=0.0)
    requests = [make_request(f"r{i}", range(i, i + 4), max_tokens=5, seed=i) for i in range(2)]
    driver.add(*requests)
    driver.run()
    assert driver.scheduler.stats().num_preemptions_total == 0
    assert driver.scheduler.stats().num_drafts_total > 0


def test_drafts_are_ignored_unless_asked_for(make_driver):
    driver = make_driver(num_speculative_tokens=0)
    driver.runner._num_draft_tokens = 3
    request = make_request("a", range(5), max_tokens=6)
    driver.add(request)
    driver.run()
    assert all(not step.draft_token_ids for step in driver.steps)
    assert driver.transcripts["a"].token_ids == expected_of(request)


def test_nobody_waits_while_no_drafts_follow(make_driver):
    requests = [make_request(name, range(5), max_tokens=40) for name in "ab"]
    driver = make_driver(num_speculative_tokens=3, num_lookahead_tokens=3, draft_accuracy=0.7, depth=1)
    driver.runner.rests_in = range(4, 16)
    driver.add(*requests)
    alone = set()
    while driver.step():
        if not driver._flying:
            alone.add(driver.steps[-1].step_id)  # its result came in before the next step was planned
    assert [driver.transcripts[name].token_ids for name in "ab"] == [expected_of(request) for request in requests]
    assert {step.step_id for step in driver.steps} - alone == set(range(5, 17))
    # The proposals of step 16 came behind a step that was planned before: they are dropped, then drafting goes on.
    assert [step.step_id for step in driver.steps if step.draft_token_ids] == [*range(1, 5), *range(18, 24)]


def test_a_block_is_remembered_when_all_of_it_is_computed(make_driver):
    """The last token was sampled where a draft was wrong: its slot holds what was computed for the draft."""
    free = make_request("free", range(5), max_tokens=3)
    stop = expected_of(free)[2]
    first = make_request("first", range(5), max_tokens=9, stop_token_ids=[stop])
    driver = make_driver(num_speculative_tokens=3, draft_accuracy=0.0, prefix_cache=True)
    driver.add(first)
    driver.run()
    known = [*first.prompt_token_ids, *driver.transcripts["first"].token_ids]
    assert len(known) == 8
    second = make_request("second", [*known, 1, 2], max_tokens=4)
    driver.add(second)
    driver.run()
    assert second.num_cached_tokens == 4
    assert driver.transcripts["second"].token_ids == expected_of(second)
