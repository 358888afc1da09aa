"""Shares of steps: what a flood may add to the steps of another tenant, by what steps cost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire_interfaces import ConfigError, ModelRunnerOutput, Request, SchedulerOutput
from quire_scheduler import SchedulerConfig
from quire_scheduler.fair_queue import FairQueue
from quire_scheduler.tenant_share import StepCostModel, TenantShareRule
from quire_testkit.conformance.scheduler import Driver, expected_of, make_request


class Steps:
    """A clock by which a step takes the seconds that are said for its rows and prompt tokens."""

    def __init__(self, driver: Driver, cost: tuple[float, float, float]) -> None:
        self.now_s, self.cost = 0.0, cost
        (rule,) = [each for each in driver.scheduler._rules if isinstance(each, TenantShareRule)]
        rule._clock = lambda: self.now_s
        self.rule, self._driver = rule, driver
        update = driver.scheduler.update

        def timed(output: SchedulerOutput, result: ModelRunnerOutput):
            self.now_s += self.seconds(output)
            return update(output, result)

        driver.scheduler.update = timed

    def seconds(self, output: SchedulerOutput) -> float:
        num_rows, num_tokens = len(output.rows), output.total_num_scheduled_tokens
        fixed, per_row, per_prompt_token = self.cost
        return fixed + per_row * num_rows + per_prompt_token * (num_tokens - num_rows)

    def learn(self) -> None:
        """Steps of one and of several rows, with prompts and without."""
        for number, count in enumerate((1, 4, 2, 7)):
            self._driver.add(*requests("first", count, name=f"learn{number}-"))
            self._driver.run()
        self.now_s += 10


def requests(tenant: str, count: int, *, num_prompt: int = 4, max_tokens: int = 8, name: str = "") -> list[Request]:
    ids = [f"{name or tenant}{index}" for index in range(count)]
    prompt = [number % 50 for number in range(num_prompt)]
    return [make_request(each, prompt, max_tokens=max_tokens, tenant=tenant, seed=i) for i, each in enumerate(ids)]


def rows_of(output: SchedulerOutput, tenant: str) -> int:
    return sum(each.startswith(tenant) for each in output.request_ids)


@pytest.fixture
def make_steps(make_driver: Callable[..., Driver]):
    def make(cost: tuple[float, float, float], **settings) -> tuple[Driver, Steps]:
        defaults = {"max_num_seqs": 16, "num_blocks": 400, "max_num_batched_tokens": 256, "max_tenant_slowdown": 1.7}
        driver = make_driver(**{**defaults, **settings})
        return driver, Steps(driver, cost)

    return make


def test_the_cost_of_steps_is_found():
    costs = StepCostModel()
    for number in range(64):
        num_rows, num_prompt_tokens = number % 7 + 1, number % 3 * 40
        costs.add(num_rows, num_prompt_tokens, 2.0 + 0.5 * num_rows + 0.01 * num_prompt_tokens)
    assert costs.cost == pytest.approx((2.0, 0.5, 0.01), rel=0.1)
    costs.add(3, 0, 1000.0)  # the machine was busy with something else
    for number in range(15):
        costs.add(number % 7 + 1, 0, 2.0 + 0.5 * (number % 7 + 1))
    assert costs.cost == pytest.approx((2.0, 0.5, 0.01), rel=0.15)


def test_steps_that_are_all_alike_cost_what_their_rows_cost():
    costs = StepCostModel()
    for _ in range(32):
        costs.add(8, 0, 4.0)
    fixed, per_row, _ = costs.cost
    assert per_row == pytest.approx(0.5, rel=0.01)
    assert fixed < 0.2


@pytest.mark.parametrize("depth", [0, 1])
def test_where_rows_are_dear_a_flood_gets_as_many_as_the_other(make_steps, depth):
    driver, steps = make_steps((0.0, 1.0, 0.0), depth=depth)
    steps.learn()
    flood, small = requests("flood", 12, max_tokens=20), requests("small", 2, max_tokens=30)
    driver.add(*flood)
    driver.step()
    assert len(driver.steps[-1].request_ids) == 12  # alone, it has all
    driver.add(*small)
    for _ in range(2 + depth):
        driver.step()
    assert rows_of(driver.steps[-1], "small") == 2
    assert rows_of(driver.steps[-1], "flood") == 2
    driver.run()
    for request in (*flood, *small):
        assert driver.transcripts[request.request_id].token_ids == expected_of(request)


def test_a_flood_that_comes_later_waits_for_its_share(make_steps):
    driver, steps = make_steps((0.0, 1.0, 0.0))
    steps.learn()
    driver.add(*requests("small", 2, max_tokens=30))
    driver.step()
    driver.add(*requests("flood", 12, max_tokens=20))
    driver.step()
    assert rows_of(driver.steps[-1], "flood") == 2
    assert driver.scheduler.waiting_reasons() == {"tenant_share": 10}
    driver.run()


def test_where_rows_cost_next_to_nothing_a_flood_keeps_them(make_steps):
    driver, steps = make_steps((1.0, 0.001, 0.0))
    steps.learn()
    driver.add(*requests("flood", 12, max_tokens=20), *requests("small", 2, max_tokens=20))
    for _ in range(4):
        driver.step()
    assert rows_of(driver.steps[-1], "flood") == 12
    driver.run()


def test_prompts_of_a_flood_do_not_stretch_the_steps_of_others(make_steps):
    driver, steps = make_steps((1.0, 0.1, 0.1))
    steps.learn()
    small = requests("small", 1, max_tokens=60)
    driver.add(*small)
    driver.step()
    alone_s = steps.seconds(driver.steps[-1])
    flood = requests("flood", 30, num_prompt=120, max_tokens=2)
    driver.add(*flood)
    begin_s, num_before = steps.now_s, len(driver.steps)
    while not driver.transcripts["small0"].finish_reason:
        driver.step()
    num_steps = len(driver.steps) - num_before
    assert (steps.now_s - begin_s) / num_steps < 1.9 * alone_s  # a prompt at once takes 12 s
    num_prompt_tokens = sum(step.total_num_scheduled_tokens for step in driver.steps[num_before:]) - num_steps
    assert num_prompt_tokens > 60 * 4  # of 0.7 * 1.1 s, less the flood's row
    driver.run()
    for request in (*small, *flood):
        assert driver.transcripts[request.request_id].token_ids == expected_of(request)


def test_nobody_is_bounded_once_the_other_has_left(make_steps):
    driver, steps = make_steps((0.0, 1.0, 0.0))
    steps.learn()
    driver.add(*requests("flood", 12, max_tokens=60), *requests("small", 1, max_tokens=2))
    while not driver.transcripts["small0"].finish_reason:
        driver.step()
    for _ in range(4):
        driver.step()
    assert rows_of(driver.steps[-1], "flood") == 12
    assert not steps.rule.is_watching
    driver.run()


def test_the_setting_is_read_and_checked(make_driver):
    driver = make_driver()
    assert not any(isinstance(rule, TenantShareRule) for rule in driver.scheduler._rules)
    with pytest.raises(ConfigError, match=r"max_tenant_slowdown.*above 1"):
        SchedulerConfig(max_tenant_slowdown=0.9)
    with pytest.raises(ConfigError, match="above 1"):
        TenantShareRule(1.0, FairQueue())
