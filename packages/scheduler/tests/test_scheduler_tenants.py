"""Tenants: a flood waits behind itself, in the queue, for rows, for tokens and for blocks."""

from __future__ import annotations

import pytest

from quire_interfaces import OverloadedError, Request
from quire_testkit.conformance.scheduler import Driver, expected_of, make_request


def flood(tenant: str, count: int, *, num_prompt: int = 4, max_tokens: int = 8) -> list[Request]:
    return [
        make_request(f"{tenant}{index}", range(num_prompt), max_tokens=max_tokens, tenant=tenant, seed=index)
        for index in range(count)
    ]


def admissions(driver: Driver) -> list[str]:
    """Requests in the order in which they got a row."""
    return [new.request_id for step in driver.steps for new in step.new_rows]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_who_comes_after_a_flood_gets_the_next_row(make_driver, depth, policy):
    driver = make_driver(max_num_seqs=4, depth=depth, policy=policy)
    driver.add(*flood("flood", 30))
    driver.step()
    driver.add(*flood("late", 2))
    driver.run()
    # Four rows become free together; the late one has been served less.
    assert admissions(driver)[:8] == [*(f"flood{index}" for index in range(4)), "late0", "flood4", "late1", "flood5"]


def test_each_of_many_tenants_gets_its_turn(make_driver):
    driver = make_driver(max_num_seqs=1)
    driver.add(*flood("flood", 9), *flood("b", 2), *flood("c", 2))
    driver.run()
    assert admissions(driver)[:6] == ["flood0", "b0", "c0", "flood1", "b1", "c1"]


def test_tenants_with_as_many_rows_are_served_as_many_tokens(make_driver):
    driver = make_driver(max_num_seqs=1, num_blocks=64, max_num_batched_tokens=64)
    driver.add(*flood("long", 6, num_prompt=52), *flood("short", 18, num_prompt=12))
    driver.run()
    first = admissions(driver)[:12]
    served = dict.fromkeys(("long", "short"), 0)
    for request_id in first:
        name = request_id.rstrip("0123456789")
        served[name] += 59 if name == "long" else 19
    assert abs(served["long"] - served["short"]) <= 59  # one request apart at most
    assert sum(request_id.startswith("short") for request_id in first) == 9


def test_nobody_saves_up_turns(make_driver):
    driver = make_driver(max_num_seqs=1)
    driver.add(*flood("idle", 1))
    driver.run()
    driver.add(*flood("busy", 20))
    while len(admissions(driver)) < 11:
        driver.step()
    driver.add(*[make_request(f"idle{index}", range(4), tenant="idle", seed=index) for index in range(1, 9)])
    driver.run()
    later = admissions(driver)[11:19]
    assert sum(request_id.startswith("idle") for request_id in later) == 4


def test_nobody_pays_for_having_been_alone(make_driver):
    driver = make_driver(max_num_seqs=1)
    driver.add(*flood("first", 20))
    driver.run()
    driver.add(*flood("second", 12))
    driver.step()
    driver.add(*[make_request(f"first-again{index}", range(4), tenant="first", seed=index) for index in range(6)])
    driver.run()
    assert sum(request_id.startswith("first-again") for request_id in admissions(driver)[20:30]) in (4, 5)


@pytest.mark.parametrize("depth", [0, 1])
def test_preemption_takes_from_the_flood(make_driver, depth):
    driver = make_driver(num_blocks=16, depth=depth, max_num_seqs=5)
    requests = [*flood("flood", 4, max_tokens=24), *flood("late", 1, max_tokens=24)]
    driver.add(*requests)
    driver.run()
    assert driver.scheduler.stats().num_preemptions_total > 0
    assert admissions(driver).count("late0") == 1  # the last to come, and never preempted
    for request in requests:
        assert driver.transcripts[request.request_id].token_ids == expected_of(request)


def test_rows_per_tenant_are_bounded_by_the_setting(make_driver):
    driver = make_driver(max_num_seqs=8, max_running_per_tenant=2)
    driver.add(*flood("flood", 6), *flood("late", 1))
    driver.step()
    assert driver.steps[0].request_ids == ["flood0", "late0", "flood1"]
    assert driver.scheduler.waiting_reasons() == {"max_running_per_tenant": 4}
    driver.run()
    assert not driver.scheduler.has_requests()


def test_a_flood_leaves_room_in_the_queue(make_driver):
    driver = make_driver(max_queued_requests=16)

    def taken(tenant: str | None, message: str) -> int:
        """Requests until one is refused, with these words."""
        requests = (make_request(f"{tenant}-{number}", [1], tenant=tenant) for number in range(100))
        with pytest.raises(OverloadedError, match=message) as caught:
            driver.add(*requests)
        assert caught.value.retry_after_s >= 1
        return sum(name.startswith(f"{tenant}-") for name in driver.transcripts)

    for number, share in enumerate([8, 4, 2, 1]):
        assert taken(f"t{number}", f"^{share} of your requests wait already") == share
    full = "^16 requests wait already, as many as max_queued_requests"
    assert taken("", full) == 1  # nobody in particular takes what is left
    driver.run()
    assert taken(None, full) == 16


def test_a_request_of_the_flood_that_is_aborted_gives_its_place_back(make_driver):
    driver = make_driver(max_queued_requests=4)
    driver.add(*flood("flood", 2))
    with pytest.raises(OverloadedError, match="2 of your requests"):
        driver.add(make_request("more", [1], tenant="flood"))
    driver.scheduler.abort_requests(["flood1"])
    driver.add(make_request("more", [1], tenant="flood"))
