"""Admission rules: a tenant's share lets others pass, a shared resource keeps the order, reasons can be read."""

from __future__ import annotations

import pytest

from quire_interfaces import ConfigError, Request
from quire_scheduler import MaxRunningPerTenantRule
from quire_testkit.conformance.scheduler import make_request


class Slots:
    """A resource all compete for, of which big requests need two."""

    name = "slots"
    holds_queue = True

    def __init__(self, num_slots: int) -> None:
        self.num_free = num_slots

    def need(self, request: Request) -> int:
        return 2 if request.request_id.startswith("big") else 1

    def admits(self, request: Request) -> bool:
        return self.need(request) <= self.num_free

    def admitted(self, request: Request) -> None:
        self.num_free -= self.need(request)
        assert self.num_free >= 0

    def released(self, request: Request) -> None:
        self.num_free += self.need(request)


def test_a_tenant_over_its_share_lets_others_pass(make_driver):
    driver = make_driver(max_num_seqs=4, rules=(MaxRunningPerTenantRule(1),))
    driver.add(*[make_request(f"a{i}", [1], tenant="a") for i in range(3)], make_request("b0", [1], tenant="b"))
    driver.step()
    assert driver.steps[0].request_ids == ["a0", "b0"]
    assert driver.scheduler.waiting_reasons() == {"tenant_share": 2}
    driver.run()
    assert all(told.finish_reason == "length" for told in driver.told.values())
    assert max(sum(id.startswith("a") for id in step.request_ids) for step in driver.steps) == 1


def test_a_shared_resource_keeps_the_order(make_driver):
    slots = Slots(2)
    driver = make_driver(rules=(slots,))
    driver.add(*[make_request(name, [1]) for name in ("small0", "big", "small1")])
    driver.step()
    assert driver.steps[0].request_ids == ["small0"]
    driver.run()
    assert [new.request_id for step in driver.steps for new in step.new_rows] == ["small0", "big", "small1"]
    assert slots.num_free == 2


@pytest.mark.parametrize("depth", [0, 1])
def test_resources_come_back_after_preemption_abort_and_failure(make_driver, depth):
    slots = Slots(5)
    driver = make_driver(num_blocks=6, depth=depth, rules=(slots,))
    driver.add(*[make_request(f"r{i}", range(8), max_tokens=12, seed=i) for i in range(4)])
    driver.runner.fail_on["r1"] = "broken"
    for _ in range(6):
        driver.step()
    driver.scheduler.abort_requests(["r2"])
    driver.run()
    assert slots.num_free == 5
    assert driver.scheduler.stats().num_preemptions_total > 0


def test_reasons(make_driver):
    driver = make_driver(max_num_seqs=1)
    driver.add(make_request("a", [1]), make_request("b", [1]))
    assert driver.scheduler.waiting_reasons() == {"capacity": 2}
    driver.step()
    assert driver.scheduler.waiting_reasons() == {"max_num_seqs": 1}
    driver.scheduler.pause(1)
    assert driver.scheduler.waiting_reasons() == {"paused": 1}


def test_a_share_below_one():
    with pytest.raises(ConfigError, match="max_running"):
        MaxRunningPerTenantRule(0)


def test_waiting_for_room_is_told_apart_from_waiting_for_something_of_ones_own(make_driver):
    driver = make_driver(max_num_seqs=2, rules=(MaxRunningPerTenantRule(1),))
    driver.add(*[make_request(f"a{i}", [1], max_tokens=9, tenant="a") for i in range(3)])
    driver.step()
    stats = driver.scheduler.stats()
    assert (stats.num_waiting, stats.num_waiting_deferred) == (2, 2), "a row is free, but not for this tenant"
    driver.add(*[make_request(f"b{i}", [1], max_tokens=9, tenant=f"b{i}") for i in range(3)])
    driver.step()
    stats = driver.scheduler.stats()
    assert (stats.num_waiting, stats.num_waiting_deferred) == (4, 0), "no row is free for anybody"
    driver.scheduler.pause(2)
    stats = driver.scheduler.stats()
    assert (stats.num_waiting, stats.num_waiting_deferred) == (4, 4)
    driver.scheduler.pause(0)
    driver.run()
    assert driver.scheduler.stats().num_waiting_deferred == 0
