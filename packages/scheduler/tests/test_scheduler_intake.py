"""What is refused on arrival, with which words; the queue's bound and its estimate."""

from __future__ import annotations

import dataclasses

import pytest

from quire_interfaces import ContextLengthError, OverloadedError, RequestError, SamplingParams
from quire_testkit.conformance.scheduler import make_request


def refusal(driver, request, kind=RequestError):
    with pytest.raises(kind) as caught:
        driver.add(request)
    assert driver.scheduler.num_requests() == (0, 0)
    return caught.value


def test_an_empty_prompt(make_driver):
    error = refusal(make_driver(), make_request("a", []))
    assert error.param == "prompt"


def test_no_room_for_output(make_driver):
    error = refusal(make_driver(max_model_len=5), make_request("a", range(5)), ContextLengthError)
    assert "5" in str(error)


def test_max_tokens_below_one(make_driver):
    request = make_request("a", [1])
    request.max_tokens = 0
    assert refusal(make_driver(), request).param == "max_tokens"


@pytest.mark.parametrize(("num_prompt", "max_tokens", "param"), [(17, 1, "prompt"), (10, 8, "max_tokens")])
def test_more_than_the_whole_cache(make_driver, num_prompt, max_tokens, param):
    error = refusal(make_driver(num_blocks=4), make_request("a", range(num_prompt), max_tokens=max_tokens))
    assert error.code == "kv_cache_too_small"
    assert error.param == param
    assert all(str(number) in str(error) for number in (num_prompt, max_tokens, 16))


def test_a_request_without_a_wish_is_cut_by_the_cache(make_driver):
    driver = make_driver(num_blocks=4)
    request = make_request("a", range(10), max_tokens=1000)
    request = dataclasses.replace(request, sampling_params=SamplingParams())
    driver.add(request)
    driver.run()
    assert len(driver.transcripts["a"].token_ids) == 7  # 16 slots, and a last token that needs none
    assert driver.transcripts["a"].finish_reason == "length"


def test_an_id_can_be_used_again_after_its_end(make_driver):
    driver = make_driver(depth=1)
    driver.add(make_request("a", range(5), max_tokens=50))
    for _ in range(4):
        driver.step()
    driver.scheduler.abort_requests(["a"])
    driver.transcripts.clear()
    again = make_request("a", range(7), max_tokens=3, seed=5)
    driver.add(again)
    driver.run()
    assert len(driver.transcripts["a"].token_ids) == 3


def test_the_estimate_follows_the_rate_of_endings(make_driver):
    driver = make_driver(max_num_seqs=1, max_queued_requests=16)
    for i in range(10):  # one request ends every 2 seconds
        driver.add(make_request(f"r{i}", [1], max_tokens=1, arrival_time_s=2.0 * i))
        driver.run()
    driver.add(*[make_request(f"w{i}", [1], arrival_time_s=20.0) for i in range(16)])
    with pytest.raises(OverloadedError, match="max_queued_requests") as caught:
        driver.add(make_request("x", [1], arrival_time_s=20.0))
    assert caught.value.retry_after_s == pytest.approx(2 * 2.0, rel=0.2)


def test_in_a_small_queue_one_place_has_to_become_free(make_driver):
    driver = make_driver(max_num_seqs=1, max_queued_requests=2)
    for i in range(4):
        driver.add(make_request(f"r{i}", [1], max_tokens=1, arrival_time_s=8.0 * i))
        driver.run()
    driver.add(*[make_request(f"w{i}", [1], arrival_time_s=24.0) for i in range(2)])
    with pytest.raises(OverloadedError) as caught:
        driver.add(make_request("x", [1], arrival_time_s=24.0))
    assert caught.value.retry_after_s == pytest.approx(24.0 / 4)


def test_the_estimate_is_bounded(make_driver):
    driver = make_driver(max_num_seqs=1, max_queued_requests=1)
    driver.add(make_request("a", [1], max_tokens=1))
    with pytest.raises(OverloadedError) as caught:
        driver.add(make_request("b", [1]))
    assert caught.value.retry_after_s == 1.0
    driver.run()
    driver.add(make_request("c", [1], arrival_time_s=1e6))
    with pytest.raises(OverloadedError) as caught:
        driver.add(make_request("d", [1], arrival_time_s=1e6))
    assert caught.value.retry_after_s == 60.0


def test_token_ids_that_the_cache_cannot_hash_fail_alone(make_driver):
    driver = make_driver(prefix_cache=True)
    driver.add(make_request("bad", [1, -2, 3, 4, 5, 6]), make_request("good", range(6)))
    driver.run()
    assert driver.transcripts["bad"].finish_reason == "error"
    assert "-2" in driver.transcripts["bad"].error
    assert driver.transcripts["good"].finish_reason == "length"
