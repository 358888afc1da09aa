"""The token budget: shared without phases, prompts cut to fit, one bound per long prompt."""

from __future__ import annotations

import pytest

from quire_interfaces import ConfigError
from quire_scheduler import SchedulerConfig
from quire_testkit.conformance.scheduler import expected_of, make_request


def test_decodes_and_a_prompt_share_a_step(make_driver):
    driver = make_driver(max_num_batched_tokens=10)
    driver.add(make_request("a", range(4)), make_request("b", range(30), seed=1))
    driver.run()
    first, second = driver.steps[:2]
    assert (first.num_scheduled_tokens, first.samples) == ([4, 6], [True, False])
    assert (second.num_scheduled_tokens, second.samples) == ([1, 9], [True, False])
    assert [new.request_id for new in first.new_rows] == ["a", "b"]
    assert second.new_rows == []


def test_the_threshold_leaves_room_for_others(make_driver):
    driver = make_driver(max_num_batched_tokens=20, long_prefill_token_threshold=6)
    driver.add(make_request("long", range(18)), make_request("short", range(5), seed=1))
    driver.run()
    assert driver.steps[0].num_scheduled_tokens == [6, 5]
    assert [step.num_scheduled_tokens[0] for step in driver.steps[:4]] == [6, 6, 6, 1]


def test_without_chunking_a_prompt_waits_until_it_fits_whole(make_driver):
    driver = make_driver(max_num_batched_tokens=20, max_model_len=20, enable_chunked_prefill=False)
    requests = [make_request(f"r{i}", range(i, i + 12), seed=i, max_tokens=5) for i in range(4)]
    driver.add(*requests)
    driver.run()
    for step in driver.steps:
        assert all(n in (1, 12) for n in step.num_scheduled_tokens)
        assert all(step.samples)
    assert driver.steps[0].num_scheduled_tokens == [12]
    assert driver.steps[1].num_scheduled_tokens == [1, 12]
    for request in requests:
        assert driver.transcripts[request.request_id].token_ids == expected_of(request)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_no_step_computes_what_nobody_asked_for(make_driver, depth):
    driver = make_driver(depth=depth)
    driver.add(make_request("a", range(5), max_tokens=6), make_request("b", range(5), max_tokens=16, seed=1))
    driver.run()
    # The last token is sampled, but never computed; no step goes beyond it, however many are in flight.
    assert sum(step.total_num_scheduled_tokens for step in driver.steps) == (5 + 6 - 1) + (5 + 16 - 1)


def test_the_context_ends_the_output(make_driver):
    driver = make_driver(max_model_len=9)
    driver.add(make_request("a", range(5), max_tokens=100))
    driver.run()
    assert len(driver.transcripts["a"].token_ids) == 4
    assert driver.transcripts["a"].finish_reason == "length"


def test_prefix_hits_are_not_computed_again(make_driver):
    driver = make_driver(prefix_cache=True)
    driver.add(make_request("a", range(11)))
    driver.run()
    again = make_request("b", range(11))
    driver.add(again)
    driver.run()
    assert driver.transcripts["b"].token_ids == expected_of(again)
    assert driver.transcripts["b"].num_cached_tokens == 8
    stats = driver.scheduler.stats()
    assert (stats.prefix_cache_query_tokens_total, stats.prefix_cache_hit_tokens_total) == (22, 8)
    assert stats.num_prompt_tokens_total == 22
    assert stats.num_generation_tokens_total == 16


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"policy": "lifo"}, "fcfs, priority"),
        ({"enable_chunked_prefill": False}, "max_model_len"),
        ({"enable_chunked_prefill": False, "max_model_len": 4096}, "4096"),
        ({"enable_chunked_prefill": False, "max_model_len": 64, "long_prefill_token_threshold": 3}, "threshold"),
        ({"enable_chunked_prefill": "no"}, "enable_chunked_prefill"),
        ({"max_num_seqs": 2.5}, "max_num_seqs"),
    ],
)
def test_settings_that_cannot_work(settings, words):
    with pytest.raises(ConfigError, match=words):
        SchedulerConfig(**settings)
