"""The controller finds the best draft length of simulated machines, costs little, and follows changes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from quire_interfaces import ConfigError
from quire_spec_decode import DraftController

Cost = Callable[[int, int], float]


class Machine:
    """Steps of `rows` requests whose drafts are right token by token with some probability."""

    def __init__(self, cost: Cost, chance: float, seed: int = 0) -> None:
        self.cost = cost
        self.chance = chance
        self.random = random.Random(seed)
        self.drafted = 0
        self.seconds = 0.0
        self.tokens = 0
        self.lengths: list[int] = []

    def run(self, controller: DraftController, rows: int, steps: int) -> None:
        for _ in range(steps):
            length = controller.choose(rows)
            tokens = 0
            for _ in range(rows):
                tokens += 1
                for _ in range(self.drafted):
                    if self.random.random() > self.chance:
                        break
                    tokens += 1
            seconds = self.cost(rows, self.drafted) * self.random.uniform(0.97, 1.03)
            if not controller.rests(rows):  # as runners do
                controller.observe(rows, tokens, seconds)
            self.drafted = length
            self.seconds += seconds
            self.tokens += tokens
            self.lengths.append(length)

    def plain_rate(self, rows: int) -> float:
        return rows / self.cost(rows, 0)


def memory_bound(rows: int, drafted: int) -> float:
    return 0.01 * (1 + 0.03 * rows * drafted)


def compute_bound(rows: int, drafted: int) -> float:
    return 0.002 * rows * (1 + drafted)


def test_drafts_where_it_pays() -> None:
    machine = Machine(memory_bound, 0.8)
    machine.run(DraftController(4), 1, 600)
    assert machine.lengths[-200:].count(4) > 180
    assert machine.tokens / machine.seconds > 2 * machine.plain_rate(1)


@pytest.mark.parametrize(("cost", "chance"), [(compute_bound, 0.7), (memory_bound, 0.0), (memory_bound, 0.02)])
def test_switches_off_where_it_does_not(cost: Cost, chance: float) -> None:
    machine = Machine(cost, chance)
    controller = DraftController(4)
    machine.run(controller, 4, 4000)
    assert machine.lengths[-100:].count(0) > 80
    assert machine.tokens / machine.seconds > 0.97 * machine.plain_rate(4)


def test_each_size_of_batch_has_its_own_length() -> None:
    machine = Machine(lambda rows, drafted: 0.01 + 0.004 * max(0, rows * (1 + drafted) - 12), 0.8)
    controller = DraftController(3)
    for _ in range(30):
        machine.run(controller, 2, 20)
        machine.run(controller, 30, 20)
    assert controller.present(2) == 3
    assert controller.present(30) == 0
    assert set(controller.tokens_per_second(2)) == {0, 2, 3}


def test_follows_when_texts_change() -> None:
    controller, machine = DraftController(4), Machine(memory_bound, 0.0)
    machine.run(controller, 1, 500)
    assert machine.lengths[-100:].count(0) > 80
    machine.chance = 0.9
    machine.run(controller, 1, 3000)
    assert machine.lengths[-300:].count(4) > 250


def test_stops_soon_when_drafts_go_wrong() -> None:
    controller, machine = DraftController(4), Machine(memory_bound, 0.9)
    machine.run(controller, 1, 2000)
    machine.chance = 0.0
    machine.run(controller, 1, 120)
    assert machine.lengths[-60:].count(0) > 45


def test_rows_whose_drafts_are_wrong_get_one_until_they_are_right() -> None:
    controller = DraftController(4)
    assert controller.limit(7, 4) == 4
    for _ in range(12):
        controller.verified(7, 4, 0)
    assert (controller.limit(7, 4), controller.limit(7, 0), controller.limit(8, 4)) == (1, 0, 4)
    controller.verified(7, 1, 1)
    assert controller.limit(7, 4) == 4
    for _ in range(12):
        controller.verified(7, 4, 0)
    controller.forget(7)
    assert controller.limit(7, 4) == 4


def test_needs_a_token() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        DraftController(0)


def test_a_hopeless_trial_is_short() -> None:
    machine = Machine(compute_bound, 0.0)
    machine.run(DraftController(8), 4, 100)
    assert machine.lengths.count(8) == 0
    assert machine.lengths.count(4) in (2, 3)  # one whose drafts come with the next step, and one or two that show it
    assert machine.tokens / machine.seconds > 0.8 * machine.plain_rate(4)


def test_heads_begin_with_prompts() -> None:
    """Plain steps cut them off."""
    controller, machine = DraftController(4, catches_up=False), Machine(memory_bound, 0.8)
    assert controller.with_prompts(1) == 2
    machine.run(controller, 1, 12)
    assert machine.lengths == [2] * 6 + [0] * 6
    machine.run(controller, 1, 300)
    assert set(machine.lengths[12:]) == {0}
    assert controller.rests(1)
    for _ in range(3):
        assert controller.with_prompts(1) == 2
    machine.lengths.clear()
    machine.run(controller, 1, 270)
    assert machine.lengths == [2] * 256 + [4] * 6 + [0] * 8
    assert controller.with_prompts(1) == 4
    machine.run(controller, 1, 100)
    assert machine.lengths[-100:] == [4] * 100


def test_the_first_trial_of_a_head_is_short_where_it_says_much() -> None:
    controller, machine = DraftController(4, catches_up=False), Machine(compute_bound, 0.8)
    machine.run(controller, 8, 9)
    assert (
        machine.lengths == [2] * 2 + [0] * 7
    )  # nothing was drafted for the first step, and the second one had 16 tokens
    assert controller.rests(8)
    machine.run(controller, 4, 8)
    assert controller.with_prompts(4) == 0, "too much was lost for another trial"


def test_a_larger_batch_begins_without_where_a_smaller_one_ended_without() -> None:
    controller, machine = DraftController(4), Machine(compute_bound, 0.5)
    machine.run(controller, 2, 60)
    assert controller.rests(2)
    machine.run(controller, 8, 2)
    assert controller.rests(8)
    assert not controller.rests(1)


def test_what_one_size_of_batch_lost_counts_for_all() -> None:
    """Each size would lose ten plain steps."""
    controller, machine = DraftController(4), Machine(lambda rows, drafted: 0.01 * (1 + 6 * (drafted > 0)), 0.5)
    machine.run(controller, 8, 100)
    lost = machine.lengths.count(2)
    assert 1 <= lost <= 4
    for rows in (4, 2, 1):
        machine.run(controller, rows, 50)
    assert machine.lengths.count(2) == lost
    machine.run(controller, 1, 3000)
    assert machine.lengths.count(2) > lost
    assert machine.seconds < 1.02 * 0.01 * len(machine.lengths)


def test_trials_come_so_late_that_they_cost_little() -> None:
    """Catching up makes the first step of each trial take as long as forty plain ones."""
    controller, seconds, plain_s, drafted = DraftController(4), 0.0, 0.01, 0
    num_steps = 30_000
    for _ in range(num_steps):
        length = controller.choose(1)
        step_s = plain_s * (1 + drafted) + (0.4 if length and not drafted else 0.0)
        if not controller.rests(1):
            controller.observe(1, 1, step_s)
        seconds += step_s
        drafted = length
    assert num_steps * plain_s / seconds > 0.98


def test_tells_what_drafting_saved() -> None:
    controller = DraftController(1)
    while controller.choose(1) == 0:
        assert controller.observe(1, 1, 0.1) == 0
    assert controller.observe(1, 1, 0.15) == pytest.approx(-0.05)
    controller.choose(1)
    assert controller.observe(1, 2, 0.15) == pytest.approx(0.05)


def test_drafting_beside_prompts_has_to_be_earned_back() -> None:
    def length(charged_s: float) -> int:
        controller = DraftController(1)
        drafted = 0
        for _ in range(40):
            now = controller.choose(1)
            controller.charge(1, charged_s)
            controller.observe(1, 1 + drafted, 0.01 * (1 + 0.2 * drafted))
            drafted = now
        return controller.present(1)

    assert (length(0.0), length(0.02)) == (1, 0)


def told(cost: Cost, *sizes: int, **fields: bool) -> DraftController:
    """A controller that knows what steps of such a machine cost."""
    controller = DraftController(4, **fields)
    for rows in sizes:
        controller.learn_costs(rows, {length: cost(rows, length) for length in controller.lengths})
    return controller


def test_what_cannot_pay_is_never_tried() -> None:
    """Each token takes its time, drafted ones some more: five right ones are slower than five steps."""
    machine = Machine(lambda rows, drafted: 0.002 * rows * (1 + 1.2 * drafted), 1.0)
    for catches_up in (True, False):
        controller = told(machine.cost, 1, catches_up=catches_up)
        assert controller.with_prompts(1) == 0
        for rows in (1, 3, 20):  # of larger ones nothing was measured
            machine.run(controller, rows, 2000)
    assert set(machine.lengths) == {0}


def test_only_lengths_that_can_pay_are_tried() -> None:
    machine = Machine(lambda rows, drafted: 0.01 * (1 + (2.5 if drafted else 0)), 1.0)
    machine.run(told(machine.cost, 1), 1, 2000)
    assert set(machine.lengths) == {0, 4}
    assert machine.lengths[-200:].count(4) > 180


def test_it_is_tried_again_where_longer_texts_make_steps_slow() -> None:
    def cost(rows: int, drafted: int) -> float:
        return 0.01 + 0.03 * drafted

    machine = Machine(cost, 0.95)
    controller = told(cost, 8)
    machine.run(controller, 8, 1000)
    assert set(machine.lengths) == {0}
    machine.cost = lambda rows, drafted: 0.2 + cost(rows, drafted)
    machine.run(controller, 8, 3000)
    assert machine.lengths[-200:].count(4) > 180


def test_a_risky_first_trial_waits_until_it_is_cheap() -> None:
    def cost(rows: int, drafted: int) -> float:
        return 0.01 * (1 + 0.6 * drafted)

    machine = Machine(cost, 0.0)
    machine.run(told(cost, 1), 1, 150)
    assert set(machine.lengths) == {0}, "two such steps lose 24 ms, which is 1 % of 240 steps"
    machine.run(told(cost, 1), 1, 2000)
    assert 2 in machine.lengths
    assert machine.seconds < 1.02 * 0.01 * len(machine.lengths)
    good = Machine(memory_bound, 0.8)
    good.run(told(memory_bound, 1), 1, 20)
    assert 2 in good.lengths, "half of these drafts are enough"
