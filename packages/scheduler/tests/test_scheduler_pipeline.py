"""Steps for several pipeline stages: no request is in two of them, and each has its share of the decodes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire_interfaces import ConfigError
from quire_scheduler import PipelineRule
from quire_testkit.conformance.scheduler import Driver, expected_of, make_request


@pytest.mark.parametrize("num_stages", [2, 3])
def test_steps_that_are_on_their_way_share_the_decodes(make_driver: Callable[..., Driver], num_stages: int) -> None:
    driver = make_driver(depth=num_stages - 1, rules=(PipelineRule(num_stages),))
    requests = [make_request(f"r{i}", range(3, 3 + 5), max_tokens=12) for i in range(6)]
    driver.add(*requests)
    most = 0
    while driver.step():
        on_their_way = [step for step, _ in driver._flying]
        most = max(most, len(on_their_way))
        sampling = [request_id for step in on_their_way for request_id in step.request_ids]
        assert len(sampling) == len(set(sampling)), "a request is in two steps that are on their way"
    assert most == num_stages - 1, "the driver takes a result in whenever it has more"
    for request in requests:
        assert driver.transcripts[request.request_id].token_ids == expected_of(request)
    decodes = [step.request_ids for step in driver.steps if step.rows and not step.new_rows]
    assert {len(ids) for ids in decodes} == {6 // num_stages}
    assert len(decodes) == 11 * num_stages


def test_chunks_of_a_prompt_follow_each_other_at_once(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver(depth=1, rules=(PipelineRule(2),), max_num_batched_tokens=4)
    driver.add(request := make_request("r", range(3, 3 + 16), max_tokens=3))
    driver.step()
    driver.step()
    assert [step.num_computed_tokens for step in driver.steps] == [[0], [4]]
    driver.run()
    assert driver.transcripts["r"].token_ids == expected_of(request)


def test_preempted_and_aborted_requests_leave_their_share_to_others(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver(depth=1, num_blocks=9, rules=(PipelineRule(2),))
    requests = [make_request(f"r{i}", range(3, 3 + 6), max_tokens=14) for i in range(4)]
    driver.add(*requests)
    for _ in range(5):
        driver.step()
    driver.scheduler.abort_requests(["r0"])
    driver.run()
    assert driver.scheduler.stats().num_preemptions_total > 0
    for request in requests[1:]:
        assert driver.transcripts[request.request_id].token_ids == expected_of(request)


def test_a_pipeline_has_a_step() -> None:
    with pytest.raises(ConfigError, match="num_steps must be at least 1, got 0"):
        PipelineRule(0)
