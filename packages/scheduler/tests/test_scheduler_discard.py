"""A step that failed as a whole: everything in it is computed again, and what was built on it or under it is void."""

from __future__ import annotations

import pytest

from quire_testkit.conformance.scheduler import expected_of, make_request


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("num_landed", [0, 1, 2])
def test_results_of_earlier_steps_that_come_late_are_void(make_driver, logprobs, num_landed):
    driver = make_driver(depth=3)
    requests = [make_request(f"r{i}", range(5), seed=i, logprobs=logprobs) for i in range(2)]
    driver.add(*requests)
    driver.step()
    driver.step()
    driver.runner.raise_on.add("r1")
    output = driver.scheduler.schedule()
    with pytest.raises(RuntimeError, match="broke the step"):
        driver.runner.execute(output)
    driver.runner.raise_on.clear()
    for _ in range(num_landed):
        driver.land()
    driver.scheduler.discard_step(output)
    driver.run()
    for request in requests:
        transcript = driver.transcripts[request.request_id]
        assert transcript.token_ids == expected_of(request)
        assert len(transcript.logprobs) == (0 if logprobs is None else len(transcript.token_ids))


def test_rows_freed_by_a_failed_step_are_freed_again(make_driver):
    driver = make_driver(max_num_seqs=2)
    driver.add(make_request("short", [1, 2], max_tokens=1), make_request("long", [1, 2], max_tokens=5, seed=1))
    driver.step()
    driver.runner.raise_on.add("long")
    output = driver.scheduler.schedule()
    assert output.freed_rows == [0]
    with pytest.raises(RuntimeError):
        driver.runner.execute(output)
    driver.runner.raise_on.clear()
    driver.scheduler.discard_step(output)
    again = driver.scheduler.schedule()
    assert sorted(again.freed_rows) == [0, 1]
    assert again.rows == [0]


def test_a_row_in_use_again_is_not_freed_for_an_old_step(make_driver):
    driver = make_driver(max_num_seqs=2)
    driver.add(make_request("short", [1, 2], max_tokens=1), make_request("long", [1, 2], max_tokens=5, seed=1))
    driver.step()
    failed = driver.scheduler.schedule()
    assert failed.freed_rows == [0]
    driver.runner.raise_on.add("long")
    with pytest.raises(RuntimeError):
        driver.runner.execute(failed)
    driver.runner.raise_on.clear()
    new = make_request("new", [3, 4], seed=2)
    driver.add(new)
    later = driver.scheduler.schedule(frozenset({"new"}))
    assert later.rows == [0]
    result = driver.runner.execute(later)
    driver.scheduler.discard_step(failed)
    driver._flying.append((later, result))
    driver.land()
    driver.run()
    assert driver.transcripts["new"].token_ids == expected_of(new)


@pytest.mark.parametrize("logprobs", [None, 1])
def test_drafts_of_a_void_step_are_not_kept(make_driver, logprobs):
    driver = make_driver(num_speculative_tokens=3, draft_accuracy=1.0)
    request = make_request("a", range(5), logprobs=logprobs)
    other = make_request("b", range(5), seed=1)
    driver.add(request)
    first = driver.scheduler.schedule()
    result = driver.runner.execute(first)
    driver.add(other)
    second = driver.scheduler.schedule()
    driver.runner.execute(second)
    driver.scheduler.discard_step(second)
    assert driver.scheduler.update(first, result)[0].new_token_ids == expected_of(request)[:1]
    driver.transcripts["a"].token_ids += expected_of(request)[:1]
    driver.run()
    assert driver.transcripts["a"].token_ids == expected_of(request)
    assert driver.transcripts["b"].token_ids == expected_of(other)


def test_only_limits_the_step(make_driver):
    driver = make_driver()
    driver.add(*[make_request(f"r{i}", [i, 1], seed=i) for i in range(4)])
    assert driver.scheduler.schedule(frozenset()) is None
    output = driver.scheduler.schedule(frozenset({"r1", "r3", "nobody"}))
    assert output.request_ids == ["r1", "r3"]
    driver._flying.append((output, driver.runner.execute(output)))
    driver.land()
    output = driver.scheduler.schedule(frozenset({"r2", "r3"}))
    assert output.request_ids == ["r3", "r2"]
    driver._flying.append((output, driver.runner.execute(output)))
    driver.run()
    assert all(transcript.finish_reason == "length" for transcript in driver.transcripts.values())
