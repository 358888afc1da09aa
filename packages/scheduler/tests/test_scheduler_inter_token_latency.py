"""The bound on the time between tokens: chunks of prompts are as large as measured steps leave room for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire_interfaces import AdmissionRule, ConfigError, ModelRunnerOutput, Request, SchedulerOutput
from quire_scheduler import SchedulerConfig
from quire_scheduler.inter_token_latency import InterTokenLatencyRule
from quire_scheduler.step_cost import StepCostModel
from quire_testkit.conformance.scheduler import Driver, expected_of, make_request

FIXED_S, ROW_S, TOKEN_S = 0.05, 0.001, 0.003


def seconds(output: SchedulerOutput) -> float:
    num_rows, num_tokens = len(output.rows), output.total_num_scheduled_tokens
    return FIXED_S + ROW_S * num_rows + TOKEN_S * (num_tokens - num_rows)


@pytest.fixture
def make_timed(make_driver: Callable[..., Driver]):
    """A driver whose steps take what `seconds` says, by the rule's clock."""

    def make(bound_s: float, **settings: Any) -> Driver:
        defaults = {"max_num_seqs": 16, "num_blocks": 4000, "max_num_batched_tokens": 2048}
        driver = make_driver(**{**defaults, **settings}, max_inter_token_latency=bound_s)
        (rule,) = [each for each in driver.scheduler._rules if isinstance(each, InterTokenLatencyRule)]
        now_s = 0.0
        rule._clock = lambda: now_s
        update = driver.scheduler.update

        def timed(output: SchedulerOutput, result: ModelRunnerOutput):
            nonlocal now_s
            now_s += seconds(output)
            return update(output, result)

        driver.scheduler.update = timed
        return driver

    return make


class Watcher(AdmissionRule):
    """Wants to be asked about each running request, and lets those that are named compute nothing."""

    name = "watcher"
    holds_queue = False
    is_watching = True

    def __init__(self) -> None:
        self.held: set[str] = set()

    def allowed_tokens(self, request: Request, start: int, num_tokens: int) -> int:
        return 0 if request.request_id in self.held else num_tokens


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + number) % 50 for number in range(length)]


def decode_steps(driver: Driver) -> list[SchedulerOutput]:
    """Steps in which somebody decodes."""
    return [
        output
        for output in driver.steps
        if any(
            count == 1 and start > 0
            for count, start in zip(output.num_scheduled_tokens, output.num_computed_tokens, strict=False)
        )
    ]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_long_prompt_holds_streams_up_no_longer_than_the_bound(make_timed, depth):
    driver = make_timed(0.4, depth=depth)
    streams = [make_request(f"stream{index}", prompt(30, index), max_tokens=60) for index in range(4)]
    driver.add(*streams)
    for _ in range(3):
        driver.step()
    driver.add(late := make_request("late", prompt(2000), max_tokens=4))
    driver.run()
    held_up = [seconds(output) for output in decode_steps(driver)[1:]]
    assert max(held_up) <= 0.4 * 1.05
    assert max(held_up) >= 0.4 * 0.8  # what the bound leaves is used
    for request in (*streams, late):
        assert driver.transcripts[request.request_id].token_ids == expected_of(request)


def test_nobody_who_decodes_no_bound(make_timed):
    driver = make_timed(0.1)
    driver.add(*[make_request(f"first{index}", prompt(20, index), max_tokens=3) for index in range(3)])
    driver.run()
    driver.add(make_request("late", prompt(2000), max_tokens=2))
    driver.step()
    assert driver.steps[-1].num_scheduled_tokens == [2000]


def test_requests_that_come_together_get_on_in_their_order(make_timed):
    driver = make_timed(0.3)
    driver.add(make_request("stream", prompt(20), max_tokens=80))
    for _ in range(3):
        driver.step()
    late = [make_request(f"late{index}", prompt(100, index), max_tokens=2) for index in range(5)]
    driver.add(*late)
    driver.step()
    output = driver.steps[-1]
    assert output.request_ids == ["stream", "late0"]
    assert 32 <= output.num_scheduled_tokens[1] < 100
    driver.run()
    firsts = [next(n for n, step in enumerate(driver.steps) if each.request_id in step.request_ids) for each in late]
    assert firsts == sorted(firsts)
    for request in late:
        assert driver.transcripts[request.request_id].token_ids == expected_of(request)


def test_however_slow_the_steps_are_prompts_get_on(make_timed):
    driver = make_timed(0.001)
    driver.add(make_request("stream", prompt(20), max_tokens=50))
    for _ in range(3):
        driver.step()
    driver.add(late := make_request("late", prompt(510, 7), max_tokens=2))
    driver.run()
    chunks = [
        count
        for output in driver.steps
        for each, count in zip(output.request_ids, output.num_scheduled_tokens, strict=False)
        if each == "late"
    ]
    own_tokens = (FIXED_S + ROW_S) / TOKEN_S
    assert own_tokens == 17
    assert all(32 <= chunk <= 36 for chunk in chunks[:13])  # more than the bound leaves room for
    assert driver.transcripts["late"].token_ids == expected_of(late)


def test_prompts_get_as_much_time_as_decodes_that_are_beyond_the_bound_themselves(make_timed):
    driver = make_timed(0.055, max_num_seqs=40)
    driver.add(*[make_request(f"stream{index}", prompt(4, index), max_tokens=50) for index in range(39)])
    for _ in range(20):
        driver.step()
    driver.add(make_request("late", prompt(900), max_tokens=2))
    for _ in range(3):
        driver.step()
    late = driver.steps[-1].num_scheduled_tokens[-1]
    assert late * TOKEN_S == pytest.approx(FIXED_S + 39 * ROW_S, rel=0.1)


def test_decodes_that_are_planned_one_by_one_take_nothing_from_prompts(make_timed):
    driver = make_timed(0.25, max_num_seqs=80, rules=[Watcher()])
    driver.add(*[make_request(f"stream{index}", prompt(4, index), max_tokens=60) for index in range(64)])
    for _ in range(20):
        driver.step()
    driver.add(make_request("late", prompt(900), max_tokens=2))
    for _ in range(3):
        driver.step()
    assert driver.steps[-1].request_ids[-1] == "late"
    late = driver.steps[-1].num_scheduled_tokens[-1]
    assert late * TOKEN_S == pytest.approx(0.25 - FIXED_S - 64 * ROW_S, rel=0.1)


def test_a_prompt_that_another_rule_holds_takes_nothing_from_those_behind(make_timed):
    driver = make_timed(0.3, rules=[watcher := Watcher()])
    driver.add(make_request("stream", prompt(4), max_tokens=60))
    for _ in range(10):
        driver.step()
    driver.add(make_request("held", prompt(600, 3), max_tokens=2))
    driver.step()
    assert 32 <= driver.steps[-1].num_scheduled_tokens[-1] < 300
    watcher.held.add("held")
    driver.add(make_request("late", prompt(300, 9), max_tokens=2))
    driver.step()
    driver.step()
    assert driver.steps[-1].request_ids == ["stream", "late"]


@pytest.mark.parametrize("depth", [0, 1])
def test_who_ends_with_the_first_token_bounds_nobody(make_timed, depth):
    driver = make_timed(0.1, depth=depth)
    for index in range(6):
        driver.add(make_request(f"short{index}", prompt(300, index), max_tokens=1))
        driver.step()
        assert driver.steps[-1].num_scheduled_tokens == [300]


def test_a_large_step_that_was_slow_by_chance_is_outweighed_by_chunks():
    costs = StepCostModel(is_early=True)
    costs.add(8, 2040, 20.0)
    for number in range(64):
        num_prompt_tokens = number % 3 * 40
        costs.add(8, num_prompt_tokens, 0.05 + 0.002 * 8 + 0.001 * num_prompt_tokens)
    assert costs.cost is not None
    assert costs.cost.per_prompt_token == pytest.approx(0.001, rel=0.5)


def test_another_bound_needs_a_new_start(make_timed):
    driver = make_timed(0.3)
    with pytest.raises(ConfigError, match="start again"):
        driver.scheduler.reconfigure(SchedulerConfig(max_inter_token_latency=0.4))


def test_prompts_that_may_not_be_cut_are_not_bounded(make_driver):
    settings = {"enable_chunked_prefill": False, "max_model_len": 512, "max_num_batched_tokens": 512}
    driver = make_driver(**settings, max_inter_token_latency=0.001)
    assert not any(isinstance(each, InterTokenLatencyRule) for each in driver.scheduler._rules)


def test_a_prompt_larger_than_any_before_is_learnt_at_once():
    costs = StepCostModel(is_early=True)
    for _ in range(8):
        costs.add(1, 0, 0.05)
    for _ in range(8):
        costs.add(1, 1000, 3.05)
    assert costs.cost is not None
    assert costs.cost.per_prompt_token == pytest.approx(0.003, rel=0.05)


@pytest.mark.parametrize("value", [-1, True, "a", 3601, float("nan")])
def test_bounds_that_are_none_are_refused(value):
    with pytest.raises(ConfigError, match="max_inter_token_latency"):
        SchedulerConfig(max_inter_token_latency=value)
