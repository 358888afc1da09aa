"""When graphs are captured: before the first request as far as time and memory go, then while no step waits.

Graphs are recorded operations on the CPU, or a driver that only counts time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from runner_graph_network import DeviceNetwork, add_torch_networks, add_torch_ops
from runner_harness import Engine, make_request, reference_tokens
from test_runner_adapter_graphs import PROMPTS, Driver, random_model
from torch import Tensor

from quire_ops import LoraTokens
from quire_runner import ThreadedExecutor
from quire_runner.executor import IDLE_S
from quire_runner.graphs import STEPS_WITHOUT_MEMORY, DecodeGraphs
from quire_sampling import SampleMode
from quire_testkit.conformance.executor import ExecutorSuite
from quire_testkit.recorded_graph import record_graph

LAUNCHES_S, REPLAY_S = 0.015, 0.005
"""What a step takes kernel by kernel and by a graph, in seconds of the driver below."""
SIZES, MODES = (1, 2, 4, 8), (SampleMode.ARGMAX, SampleMode.SAMPLED, SampleMode.EDITED)


class CountedCapture:
    """Records graphs, and counts them."""

    def __init__(self) -> None:
        self.num_captures = 0

    def __call__(self, step: Callable[[], Any]) -> Any:
        self.num_captures += 1
        return record_graph(step)


def test_nothing_is_captured_while_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    add_torch_ops(monkeypatch)
    capture = CountedCapture()
    engine = Engine(DeviceNetwork(), capture=capture, max_num_seqs=2)
    engine.runner.warm_up(capture_s=1e9)
    graphs = engine.runner.graphs
    assert graphs is not None
    assert graphs.failure is None
    everything = {(size, mode) for size in (1, 2) for mode in SampleMode if mode is not SampleMode.HOST}
    assert set(graphs.captured) == everything
    assert capture.num_captures == len(everything)
    num_forwards = engine.network.num_forwards
    requests = [
        make_request("greedy", [1, 2, 3], max_tokens=9),
        make_request("sampled", [4, 5], max_tokens=12, temperature=0.8, seed=3),
        make_request("penalized", [6, 1], max_tokens=5, repetition_penalty=1.3),
    ]
    engine.run(*requests)
    for request in requests:
        assert engine.outcomes[request.request_id].token_ids == reference_tokens(engine.network, request)
    assert capture.num_captures == len(everything)
    # The prompts; one decodes beside each that comes later.
    assert engine.network.num_forwards - num_forwards <= len(requests)
    engine.close()


def test_graphs_with_adapters_are_captured_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    add_torch_networks(monkeypatch)
    driver = Driver(random_model("qwen3", max_loras=3), "greedy", cuda_graph_sizes=(4,))
    alone = Driver(random_model("qwen3", max_loras=3), "greedy", enforce_eager=True)
    driver.runner.warm_up(capture_s=1e9)
    graphs = driver.runner.graphs
    assert graphs is not None
    assert graphs.failure is None
    captured = len(graphs.captured)
    assert captured == 2 * len({mode for _, mode in graphs.captured})
    for _ in range(4):
        for each in (driver, alone):
            each.step({row: [] for row in range(len(PROMPTS))})
    assert driver.tokens == alone.tokens
    assert len(graphs.captured) == captured


class CountedTime:
    """A driver that computes nothing: what is asked of it takes time."""

    def __init__(self, **options: Any) -> None:
        self.now_s = 0.0
        self.num_captures = 0
        self.gaps_s: list[float] = []
        self.graphs = DecodeGraphs(
            self._compute, SIZES, MODES, padding_row=9, device=torch.device("cpu"), capture=self._capture,
            clock=lambda: self.now_s, **{"in_background": False, **options},
        )  # fmt: skip

    def _compute(
        self, spans: Tensor, mode: SampleMode, features: Tensor | None, lora: LoraTokens | None = None
    ) -> tuple[Tensor, ...]:
        self.now_s += LAUNCHES_S
        return (spans[0], spans[1].float())

    def _capture(self, step: Callable[[], Any]) -> Any:
        self.num_captures += 1

        def replay() -> None:
            self.now_s += REPLAY_S

        return replay, step()

    @torch.inference_mode()
    def serve(self, num_steps: int) -> list[float]:
        """Decode steps of all sizes and modes in turn. Returns the times between their ends, in seconds."""
        gaps = []
        for i in range(num_steps):
            begin_s = self.now_s
            rows, mode = np.arange(SIZES[i % 4]), MODES[i // 4 % 3]
            graph = self.graphs.find(len(rows), mode)
            if graph is None:
                self._compute(torch.empty(2, len(rows)), mode, None)
            else:
                graph.run(rows, rows)
            gaps.append(self.now_s - begin_s)
        return gaps


def test_tokens_come_as_evenly_as_graphs_run() -> None:
    driver = CountedTime(pause_s=1.0)
    driver.graphs.capture(60.0)
    assert driver.num_captures == len(SIZES) * len(MODES)
    assert max(driver.serve(60)) == pytest.approx(REPLAY_S)
    assert driver.num_captures == len(SIZES) * len(MODES)


def test_small_steps_without_edits_come_first_and_time_is_bounded() -> None:
    driver = CountedTime(pause_s=1.0)
    driver.graphs.capture(0.16)
    assert driver.now_s <= 0.16
    greedy_and_sampled = [(size, mode) for size in SIZES for mode in MODES[:2]]
    assert list(driver.graphs.captured) == greedy_and_sampled[:5]


def test_while_serving_a_capture_is_rare_and_its_gap_short() -> None:
    driver = CountedTime(pause_s=1.0)
    driver.graphs.capture(0.0)
    assert driver.num_captures == 0
    gaps = driver.serve(600)
    long = [gap for gap in gaps if gap > LAUNCHES_S * 1.01]
    assert len(long) == driver.num_captures <= driver.now_s + 1
    assert max(long) == pytest.approx(2 * LAUNCHES_S + REPLAY_S)


def test_what_steps_wanted_is_captured_first_while_no_step_waits() -> None:
    driver = CountedTime(pause_s=1e9)
    driver.graphs.capture(0.04)
    driver.graphs.find(8, SampleMode.EDITED)
    driver.graphs.capture_left()
    assert driver.graphs.captured == ((1, SampleMode.ARGMAX), (8, SampleMode.EDITED))
    while driver.graphs.has_left:
        driver.graphs.capture_left()
    assert max(driver.serve(24)) == pytest.approx(REPLAY_S)


def test_memory_is_bounded() -> None:
    driver = CountedTime(has_memory=lambda: driver.num_captures < 3)
    driver.graphs.capture(60.0)
    assert driver.num_captures == 3
    assert not driver.graphs.has_left
    driver.serve(60)
    assert driver.num_captures == 3


def test_ranks_capture_the_same_graphs_at_the_same_steps() -> None:
    """Whatever the clock of each says."""
    ranks = [CountedTime(pause_s=1e9), CountedTime(in_background=True)]
    captured = []
    for rank in ranks:
        rank.graphs.follow_steps(lambda own: own)
        captured.append([(len(rank.serve(1)), rank.num_captures) for _ in range(30)])
        assert not rank.graphs.has_left
    assert captured[0] == captured[1]
    assert ranks[0].num_captures == 1
    assert max(ranks[0].serve(60)[24:]) == max(ranks[1].serve(60)[24:]) == pytest.approx(REPLAY_S)


class TwoRanks:
    """Two ranks, each in its thread, that decide together."""

    def __init__(self, *options: dict[str, Any]) -> None:
        self.ranks = [CountedTime(**each) for each in options]
        self._said = [False, False]
        self._all_said = threading.Barrier(2)
        for number, rank in enumerate(self.ranks):
            rank.graphs.follow_steps(partial(self._agree, number))

    def _agree(self, number: int, own: bool) -> bool:
        self._said[number] = own
        self._all_said.wait(60)
        agreed = all(self._said)
        self._all_said.wait(60)
        return agreed

    def serve(self, num_steps: int) -> None:
        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(rank.serve, num_steps) for rank in self.ranks]:
                done.result(60)


def test_a_graph_that_one_rank_cannot_capture_is_captured_by_none(caplog: pytest.LogCaptureFixture) -> None:
    both = TwoRanks({}, {})
    capture, other = both.ranks[1].graphs._capture, both.ranks[0].graphs

    def third_fails(step: Callable[[], Any]) -> Any:
        if both.ranks[1].num_captures == 2:
            raise MemoryError("out of memory")
        return capture(step)

    both.ranks[1].graphs._capture = third_fails
    both.serve(60)
    graphs = [rank.graphs for rank in both.ranks]
    assert graphs[0].captured == graphs[1].captured == ((1, SampleMode.ARGMAX), (2, SampleMode.ARGMAX))
    assert other.failure == "another rank could not capture it"
    assert graphs[1].failure == "MemoryError: out of memory"
    assert both.ranks[0].num_captures == 3  # and none after that


def test_without_memory_on_one_rank_none_captures_until_it_has_some() -> None:
    both = TwoRanks({}, {})
    both.ranks[1].graphs._has_memory = lambda: both.ranks[1].num_captures < 2
    both.serve(60)
    assert [rank.num_captures for rank in both.ranks] == [2, 2]
    both.ranks[1].graphs._has_memory = lambda: True
    both.serve(2 * STEPS_WITHOUT_MEMORY)
    assert both.ranks[0].graphs.captured == both.ranks[1].graphs.captured
    assert len(both.ranks[0].graphs.captured) == len(SIZES) * len(MODES)


@pytest.mark.parametrize("follows_steps", [False, True], ids=["alone", "a pipeline stage"])
def test_memory_is_asked_for_now_and_then(follows_steps: bool) -> None:
    asked = []
    driver = CountedTime(has_memory=lambda: asked.append(driver.graphs.captured) or len(asked) > 2)
    if follows_steps:
        driver.graphs.follow_steps(lambda own: own)
    driver.serve(12 + 2 * STEPS_WITHOUT_MEMORY)
    assert (len(asked), driver.num_captures) == (2, 0)
    driver.serve(24)
    assert driver.num_captures == len(SIZES) * len(MODES)


def test_a_step_of_padding_that_fails_on_a_rank_fails_there() -> None:
    """The others wait for it within the step: it must not go on as if nothing had been."""
    rank = CountedTime()
    rank.graphs.follow_steps(lambda own: own)
    rank.serve(12)
    rank.graphs._compute = lambda *_: 1 // 0  # type: ignore[assignment]  # it only fails
    with pytest.raises(ZeroDivisionError):
        rank.serve(1)


def test_the_message_about_failed_captures_names_the_steps(caplog: pytest.LogCaptureFixture) -> None:
    driver = CountedTime(steps="steps with prompts")
    driver.graphs._capture = lambda step: 1 // 0  # type: ignore[assignment]  # it only fails
    driver.graphs.capture(60.0)
    assert "steps with prompts of 1 tokens cannot be captured" in caplog.text


class HeldReads:
    """A runner whose results come when they are released."""

    has_deferred_work = True

    def __init__(self) -> None:
        self.release = threading.Event()
        self.done_at_slack: list[bool] = []

    def launch(self, output: Any) -> Callable[[], Any]:
        def read() -> Any:
            assert self.release.wait(60)
            return output

        return read

    def run(self, output: Any) -> Any:
        return self.launch(output)()

    def use_slack(self) -> None:
        self.done_at_slack.append(self.release.is_set())
        self.has_deferred_work = False

    def close(self) -> None:
        pass


def test_nothing_is_captured_while_a_step_runs_on_the_device() -> None:
    runner = HeldReads()
    executor = ThreadedExecutor(runner, reads_apart=True)
    future = executor.execute(ExecutorSuite().prefill(0, [0], [1, 2]))
    time.sleep(4 * IDLE_S)
    assert not runner.done_at_slack
    runner.release.set()
    future.result(timeout=60)
    deadline_s = time.monotonic() + 60
    while runner.has_deferred_work and time.monotonic() < deadline_s:
        time.sleep(0.01)
    executor.close()
    assert runner.done_at_slack == [True]


@pytest.mark.parametrize("capture_s", [0.0, 1e-9])
def test_a_server_without_requests_captures(monkeypatch: pytest.MonkeyPatch, capture_s: float) -> None:
    add_torch_ops(monkeypatch)
    engine = Engine(DeviceNetwork(), capture=record_graph, max_num_seqs=2)
    engine.runner.warm_up(capture_s)
    executor = ThreadedExecutor(engine.runner, reads_apart=True)
    executor.prepare(engine.runner.learn_draft_costs)
    deadline_s = time.monotonic() + 60
    while engine.runner.has_deferred_work and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert engine.runner.graphs is not None
    assert len(engine.runner.graphs.captured) == 8
    executor.close()


def test_a_runner_without_steps_captures_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    add_torch_ops(monkeypatch)
    engine = Engine(DeviceNetwork(), capture=record_graph, depth=1, reads_apart=True, max_num_seqs=2)
    engine.runner.warm_up(capture_s=1e-9)
    graphs = engine.runner.graphs
    assert graphs is not None
    assert engine.runner.has_deferred_work
    engine.run(make_request("0", [1, 2, 3], max_tokens=4))
    deadline_s = time.monotonic() + 60
    while engine.runner.has_deferred_work and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert len(graphs.captured) == 8
    assert graphs.failure is None
    request = make_request("1", [3, 2, 7], max_tokens=6)
    engine.run(request)
    assert engine.outcomes["1"].token_ids == reference_tokens(engine.network, request)
    engine.close()
