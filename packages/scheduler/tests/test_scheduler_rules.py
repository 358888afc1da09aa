"""Admission rules: a tenant's share lets others pass, a shared resource keeps the order, reasons can be read."""

from __future__ import annotations

import pytest

from quire_interfaces import (
    AdmissionRule,
    CachedPrefix,
    ConfigError,
    ModelRunnerOutput,
    Request,
    RequestError,
    Reservation,
    SchedulerStats,
)
from quire_scheduler import MaxRunningPerTenantRule, SharedPromptRule
from quire_testkit.conformance.scheduler import BLOCK, expected_of, make_request


class Slots(AdmissionRule):
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


class Modem(AdmissionRule):
    """A made-up resource, plugged in from outside: each request dials in with as many pulses as its prompt has tokens,
    so many per step for all; then it holds one of few lines until it leaves its row. Steps carry a bill."""

    name = "modem"
    holds_queue = True

    def __init__(self, num_lines: int, pulses_per_step: int) -> None:
        self.num_lines = num_lines
        self.pulses_per_step = pulses_per_step
        self.pulses = 0
        self.lines: list[str] = []
        self.most_pulses = 0
        self.num_results = 0
        self.ended_ids: list[str] = []

    def check(self, request: Request) -> None:
        if request.num_prompt_tokens > self.pulses_per_step:
            raise RequestError("the number is too long", param="prompt")

    def admission_begins(self) -> None:
        self.pulses = 0

    def admits(self, request: Request) -> bool:
        return len(self.lines) < self.num_lines

    def reserve(self, request: Request, cached: CachedPrefix) -> Reservation:
        if self.pulses + request.num_prompt_tokens > self.pulses_per_step:
            return Reservation(False)
        self.pulses += request.num_prompt_tokens
        self.most_pulses = max(self.most_pulses, self.pulses)
        return Reservation(True)

    def admitted(self, request: Request) -> None:
        assert request.row >= 0
        self.lines.append(request.request_id)

    def released(self, request: Request) -> None:
        self.lines.remove(request.request_id)

    def ended(self, request: Request) -> None:
        assert request.request_id not in self.lines
        self.ended_ids.append(request.request_id)

    def step_ended(self, result: ModelRunnerOutput) -> None:
        self.num_results += 1

    def add_counters(self, stats: SchedulerStats) -> None:
        stats.num_adapter_slots = self.num_lines


@pytest.mark.parametrize("depth", [0, 1])
def test_a_new_resource_is_a_new_rule(make_driver, depth):
    """Limits admission by what is held and by a budget per step; comes back on finish, abort and preemption."""
    modem = Modem(num_lines=3, pulses_per_step=16)
    driver = make_driver(num_blocks=7, depth=depth, rules=(modem,))
    with pytest.raises(RequestError, match="too long"):
        driver.scheduler.add_request(make_request("long", range(17)))
    requests = [make_request(f"r{i}", range(7), max_tokens=12, seed=i) for i in range(6)]
    driver.add(*requests)
    driver.step()
    assert driver.steps[0].request_ids == ["r0", "r1"], "two numbers of 7 pulses fit into a step"
    assert driver.scheduler.waiting_reasons() == {"capacity": 4}
    for _ in range(4):
        driver.step()
    assert modem.lines == ["r0", "r1", "r2"] or driver.scheduler.stats().num_preemptions_total
    driver.scheduler.abort_requests(["r1", "r5"])
    assert "r1" not in modem.lines
    driver.run()
    assert driver.scheduler.stats().num_preemptions_total > 0, "the cache is too small for three of them"
    assert driver.scheduler.stats().num_adapter_slots == 3
    assert modem.lines == []
    assert modem.most_pulses == 14
    assert modem.num_results == len(driver.steps)
    assert sorted(modem.ended_ids) == [request.request_id for request in requests]
    for request in requests:
        if request.request_id not in ("r1", "r5"):
            assert driver.transcripts[request.request_id].token_ids == expected_of(request)


def test_a_tenant_over_its_share_lets_others_pass(make_driver):
    driver = make_driver(max_num_seqs=4, rules=(MaxRunningPerTenantRule(1),))
    driver.add(*[make_request(f"a{i}", [1], tenant="a") for i in range(3)], make_request("b0", [1], tenant="b"))
    driver.step()
    assert driver.steps[0].request_ids == ["a0", "b0"]
    assert driver.scheduler.waiting_reasons() == {"max_running_per_tenant": 2}
    driver.run()
    assert all(transcript.finish_reason == "length" for transcript in driver.transcripts.values())
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


@pytest.mark.parametrize("depth", [0, 1])
def test_one_of_a_group_computes_the_prompt(make_driver, depth):
    driver = make_driver(prefix_cache=True, depth=depth, rules=(SharedPromptRule(),), max_num_batched_tokens=8)
    prompt = list(range(2 * BLOCK + 1))
    for group in ("one", "two"):
        for i in range(3):
            request = make_request(f"{group}{i}", [*prompt, len(group)] if group == "one" else prompt[::-1], seed=i)
            request.prompt_group = group
            driver.add(request)
    driver.add(make_request("stranger", prompt[:3], max_tokens=1))
    driver.step()
    assert driver.steps[0].request_ids == ["one0"], "the budget is spent on one prompt, not shared by three"
    driver.run()
    cached = {name: transcript.num_cached_tokens for name, transcript in driver.transcripts.items()}
    assert cached == {
        **{f"one{i}": 2 * BLOCK if i else 0 for i in range(3)},
        **{f"two{i}": 2 * BLOCK if i else 0 for i in range(3)},
        "stranger": 0,
    }
    assert all(transcript.finish_reason is not None for transcript in driver.transcripts.values())


@pytest.mark.parametrize("leaves", ["aborted while waiting", "aborted while computing", "done with one token"])
def test_a_group_whose_first_leaves_goes_on(make_driver, leaves):
    driver = make_driver(prefix_cache=True, rules=(SharedPromptRule(),), max_num_batched_tokens=8)
    for i in range(3):
        request = make_request(
            f"r{i}", list(range(3 * BLOCK)), max_tokens=1 if leaves.startswith("done") else 4, seed=i
        )
        request.prompt_group = "g"
        driver.add(request)
    if leaves == "aborted while computing":
        driver.step()
    if leaves.startswith("aborted"):
        driver.scheduler.abort_requests(["r0"])
    driver.run()
    others = [driver.transcripts[f"r{i}"] for i in (1, 2)]
    assert all(transcript.finish_reason is not None for transcript in others)
    assert others[1].num_cached_tokens >= 2 * BLOCK


def test_groups_are_forgotten_soon(make_driver):
    """They come by the thousand, and nothing tells the rule which request is the last of its group."""
    rule = SharedPromptRule()
    driver = make_driver(prefix_cache=True, rules=(rule,), max_num_seqs=4)
    known = []
    for number in range(300):
        for i in range(2):
            request = make_request(f"{number}.{i}", [number % 7] * (BLOCK + 1), max_tokens=1, seed=i)
            request.prompt_group = f"group {number}"
            driver.add(request)
        driver.run()
        known.append(sum(1 for value in vars(rule).values() if isinstance(value, dict) for _ in value))
    assert all(transcript.finish_reason is not None for transcript in driver.transcripts.values())
    assert known[99:] == known[99:100] * 201
