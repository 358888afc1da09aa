"""Shares of steps: what a flood may add to the steps of another tenant, by what steps cost."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from quire_interfaces import AdmissionRule, ConfigError, ModelRunnerOutput, Request, SchedulerOutput
from quire_scheduler import SchedulerConfig
from quire_scheduler.fair_queue import FairQueue
from quire_scheduler.rules import MaxRunningPerTenantRule
from quire_scheduler.step_cost import StepCost, StepCostModel
from quire_scheduler.tenant_share import TenantShareRule
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


class Gate(AdmissionRule):
    """Refuses requests, by id, until they are taken out."""

    name = "gate"
    holds_queue = False

    def __init__(self) -> None:
        self.closed_to: set[str] = set()

    def admits(self, request: Request) -> bool:
        return request.request_id not in self.closed_to


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


def test_a_slowdown_that_is_no_bound_is_refused():
    for value in (float("inf"), 1e308, 1001, float("nan")):
        with pytest.raises(ConfigError, match=r"max_tenant_slowdown.*at most 1000"):
            SchedulerConfig(max_tenant_slowdown=value)
        with pytest.raises(ConfigError, match="at most 1000"):
            TenantShareRule(value, FairQueue())
    assert SchedulerConfig(max_tenant_slowdown=1000).max_tenant_slowdown == 1000


CPU = StepCost(0.010, 0.001, 0.001)
"""Seconds of steps on a CPU: shorter than a tenant's absence has to be."""


@pytest.mark.parametrize("num_prompt", [32, 16])
def test_prompts_wait_for_nobody_where_nobody_runs(make_steps, num_prompt):
    driver, steps = make_steps(CPU)
    steps.rule.costs.cost = CPU
    both = requests("a", 2, num_prompt=num_prompt, max_tokens=1), requests("b", 1, max_tokens=1)
    driver.add(*both[0], *both[1])
    driver.run()
    assert not driver.scheduler.has_requests()
    steps.now_s += 600
    driver.add(*requests("a", 1, num_prompt=32, max_tokens=1, name="late"))
    driver.run()
    assert driver.transcripts["late0"].finish_reason == "length"


def test_prompts_wait_for_nobody_whose_gate_is_closed(make_steps):
    gate = Gate()
    driver, steps = make_steps(CPU, rules=(gate,))
    steps.rule.costs.cost = CPU
    gate.closed_to.add("b0")
    driver.add(*requests("b", 1), *requests("a", 6, num_prompt=90, max_tokens=2))
    driver.run()
    assert driver.scheduler.num_requests() == (0, 1)
    gate.closed_to.clear()
    driver.run()
    assert not driver.scheduler.has_requests()


def test_prompts_are_bounded_where_requests_end_with_their_prompt(make_steps):
    driver, steps = make_steps(CPU)
    steps.rule.costs.cost = CPU
    driver.add(*requests("flood", 40, num_prompt=60, max_tokens=1), *requests("small", 1, max_tokens=1, name="small_"))
    for number in range(20):
        driver.add(*requests("small", 1, max_tokens=1, name=f"small{number}_"))
        driver.step()
        assert rows_of(driver.steps[-1], "small")
        assert driver.steps[-1].total_num_scheduled_tokens <= 4 * 2 + 64
    driver.run()


@pytest.mark.parametrize("depth", [0, 1])
def test_rows_that_sat_out_go_on_when_all_others_end_at_once(make_steps, depth):
    driver, steps = make_steps((0.0, 0.001, 0.0), depth=depth)
    steps.rule.costs.cost = StepCost(0.0, 0.001, 0.0)
    flood, small = requests("flood", 6, max_tokens=9), requests("small", 2, max_tokens=6)
    driver.add(*flood)
    for _ in range(3):
        driver.step()
    driver.add(*small)
    driver.run()
    assert [number for number, step in enumerate(driver.steps[:-1]) if not step.rows] == []
    for request in (*flood, *small):
        assert driver.transcripts[request.request_id].token_ids == expected_of(request)


def test_nobody_sits_out_beside_a_tenant_that_does_not_run(make_steps):
    cost = StepCost(0.0, 0.001, 0.0)
    driver, steps = make_steps(cost)
    steps.rule.costs.cost = cost
    driver.add(*requests("flood", 12, max_tokens=60))
    driver.step()
    driver.add(*requests("small", 2, max_tokens=4))
    while not driver.transcripts["small0"].finish_reason:
        driver.step()
    assert rows_of(driver.steps[-1], "flood") == 2
    driver.step()
    assert rows_of(driver.steps[-1], "flood") == 12  # a new one would wait still
    driver.run()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(24))
def test_an_engine_never_stands_still(make_steps, depth, seed):
    """Whenever requests wait and nothing runs, there is work, and the next plan starts some of it; while some run, the
    plan computes some of them unless a step is on its way."""
    rng = random.Random(seed)
    gate = Gate()
    cost = (rng.choice([0.0, 0.001, 0.01]), rng.choice([0.0, 0.0001, 0.001]), rng.choice([0.0, 0.0001, 0.001, 0.01]))
    settings = {"num_blocks": rng.choice([40, 400]), "max_num_batched_tokens": rng.choice([32, 256])}
    driver, steps = make_steps(cost, depth=depth, rules=(gate,), prefix_cache=seed % 2 == 0, **settings)
    if seed % 3:
        steps.rule.costs.cost = StepCost(*cost)
    ids, num_left = [f"r{index}" for index in range(60)], 60
    for _ in range(5000):
        scheduler = driver.scheduler
        if num_left and rng.random() < 0.3:
            for _ in range(min(num_left, rng.choice([1, 1, 2, 8]))):
                num_left -= 1
                prompt = list(range(rng.choice([1, 4, 16, 32, 33, 100])))
                tenant, max_tokens = rng.choice("aaaabbc"), rng.choice([1, 1, 2, 8])
                if rng.random() < 0.1:
                    gate.closed_to.add(ids[num_left])
                driver.add(make_request(ids[num_left], prompt, max_tokens=max_tokens, tenant=tenant, seed=num_left))
        if not num_left and rng.random() < 0.05:
            gate.closed_to.clear()
        alive = {request.request_id for request in scheduler.requests()}
        if not alive and not num_left:
            break
        is_idle = not driver._flying and bool(alive - gate.closed_to)
        num_before = len(driver.steps)
        assert not is_idle or scheduler.has_work(), scheduler.waiting_reasons()
        driver.step()
        assert not is_idle or any(step.rows for step in driver.steps[num_before:]), scheduler.waiting_reasons()
        steps.now_s += rng.choice([0.0, 0.0, 0.001, 0.1])
    assert not driver.scheduler.has_requests()


def test_a_fit_that_says_nothing_of_a_step_does_not_stay():
    costs = StepCostModel()
    for number in range(16):
        num_tokens = 1000 + number % 2 * 1000
        costs.add(1, num_tokens, (num_tokens / 1000) ** 2)
    assert costs.cost.fixed == costs.cost.per_row == 0
    for _ in range(64):
        costs.add(8, 0, 0.02)
    assert 0.01 < costs.cost.fixed + 8 * costs.cost.per_row < 0.03


def test_while_steps_seem_to_take_no_time_rows_are_shared_evenly(make_steps):
    driver, steps = make_steps((0.0, 0.0, 0.01))
    steps.rule.costs.cost = StepCost(0.0, 0.0, 0.01)
    driver.add(*requests("small", 2, max_tokens=30))
    driver.step()
    driver.add(*requests("flood", 12, num_prompt=40, max_tokens=20))
    driver.step()
    assert rows_of(driver.steps[-1], "flood") == 2
    assert driver.steps[-1].total_num_scheduled_tokens == 2 + 2 * 40
    driver.run()


def test_what_the_cache_had_no_room_for_is_not_paid(make_steps):
    driver, steps = make_steps(CPU, num_blocks=12)
    steps.rule.costs.cost = CPU
    driver.add(*requests("small", 1, num_prompt=24, max_tokens=12))
    driver.step()
    driver.add(*requests("flood", 2, num_prompt=30, max_tokens=2))
    for _ in range(3):
        driver.step()
    assert driver.scheduler.waiting_reasons() == {"capacity": 2}
    assert steps.rule._tokens["flood"] > 32  # the first chunk, and what was added since
    driver.run()


def test_a_prompt_that_is_cached_waits_for_no_tokens(make_steps):
    driver, steps = make_steps((0.010, 0.001, 0.01), prefix_cache=True)
    steps.rule.costs.cost = StepCost(0.010, 0.001, 0.01)
    driver.add(*requests("flood", 1, num_prompt=41, max_tokens=1, name="first"))
    driver.run()
    driver.add(*requests("small", 1, max_tokens=60))
    driver.step()
    cached = make_request("cached", [number % 50 for number in range(41)], max_tokens=2, tenant="flood")
    others = [make_request(f"other{index}", [index + 1] * 40, max_tokens=2, tenant="flood") for index in range(3)]
    driver.add(*others, cached)
    driver.step()
    assert "other0" in driver.steps[-1].request_ids  # which took the tokens that there were
    assert "cached" in driver.steps[-1].request_ids
    assert "other1" not in driver.steps[-1].request_ids
    driver.run()


def test_the_two_bounds_of_tenants_have_names_of_their_own(make_driver):
    assert MaxRunningPerTenantRule.name == "max_running_per_tenant"
    assert TenantShareRule.name == "tenant_share"
    driver = make_driver(max_running_per_tenant=1, max_tenant_slowdown=1.7)
    driver.add(*requests("a", 3))
    driver.step()
    assert driver.scheduler.waiting_reasons() == {"max_running_per_tenant": 2}
    driver.run()
