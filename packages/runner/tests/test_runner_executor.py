"""The executor, inline and threaded, and the suite itself on a second implementation."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from runner_harness import VOCAB_SIZE, Engine, TinyNetwork, cache_shape

from quire_attention.batch import ForwardBatch
from quire_interfaces import EngineDeadError, Executor
from quire_kv_cache import plan_kv_cache
from quire_runner import ModelRunner, RunnerConfig, ThreadedExecutor
from quire_testkit.conformance.executor import ExecutorSuite
from quire_testkit.fake_runner import FakeExecutor, FakeRunner


class TestInline(ExecutorSuite):
    def make_executor(self) -> Executor:
        return Engine().executor


class TestThreaded(ExecutorSuite):
    def make_executor(self) -> Executor:
        return Engine(depth=1).executor


class TestReadingApart(ExecutorSuite):
    def make_executor(self) -> Executor:
        return Engine(depth=1, reads_apart=True).executor


class TestFake(ExecutorSuite):
    """The suite must not be a description of one implementation."""

    def make_executor(self) -> Executor:
        return FakeExecutor(FakeRunner(num_rows=4, block_sizes=(self.block_size,), num_token_ids=16))


suite = ExecutorSuite()


def held_engine() -> tuple[Engine, threading.Event]:
    """An engine whose steps wait until the event is set."""
    release = threading.Event()

    def hold(batch: ForwardBatch) -> None:
        assert release.wait(60)

    return Engine(TinyNetwork(fail=hold), depth=1), release


def test_a_threaded_step_does_not_block_the_caller() -> None:
    engine, release = held_engine()
    future = engine.executor.execute(suite.prefill(0, [0], [1, 2]))
    assert not future.done()
    release.set()
    assert future.result(timeout=60).step_id == 0
    engine.close()


def test_an_inline_step_is_done_when_execute_returns_and_runs_in_the_caller() -> None:
    threads: list[threading.Thread] = []
    engine = Engine(TinyNetwork(fail=lambda batch: threads.append(threading.current_thread())))
    assert engine.executor.execute(suite.prefill(0, [0], [1, 2])).done()
    assert threads == [threading.current_thread()]
    engine.close()


def test_the_worker_uses_the_configured_number_of_threads() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    network = TinyNetwork(fail=lambda batch: seen.append(torch.get_num_threads()))
    specs = network.specs(4)
    try:
        runner = ModelRunner(
            network,
            plan_kv_cache(specs, num_blocks=20),
            RunnerConfig(dtype="float32", max_num_seqs=4, max_model_len=16, num_threads=before + 1),
            vocab_size=VOCAB_SIZE,
            cache_shape=cache_shape,
            layer_names=tuple(specs),
        )
        executor = ThreadedExecutor(runner)
        executor.execute(suite.prefill(0, [0], [1, 2])).result(timeout=10)
        executor.close()
    finally:
        torch.set_num_threads(before)
    assert seen == [before + 1]


def test_close_waits_for_running_steps() -> None:
    engine = Engine(TinyNetwork(fail=lambda batch: time.sleep(0.1)), depth=1)
    futures = [engine.executor.execute(suite.prefill(i, [i], [1, 2])) for i in range(2)]
    engine.executor.close()
    assert all(future.done() and future.exception() is None for future in futures)


def test_close_has_a_deadline() -> None:
    engine, release = held_engine()
    executor = ThreadedExecutor(engine.runner, close_timeout_s=0.1)
    future = executor.execute(suite.prefill(0, [0], [1, 2]))
    try:
        with pytest.raises(EngineDeadError, match=r"still ran 0\.1 s after close"):
            executor.close()
    finally:
        release.set()
    assert future.result(timeout=60).step_id == 0


def test_the_number_of_steps_in_flight_is_bounded() -> None:
    engine, release = held_engine()
    executor = ThreadedExecutor(engine.runner, max_in_flight=2)
    futures = [executor.execute(suite.prefill(i, [i], [1, 2])) for i in range(2)]
    try:
        with pytest.raises(EngineDeadError, match="bound is 2"):
            executor.execute(suite.prefill(2, [2], [1, 2]))
    finally:
        release.set()
    assert [future.result(timeout=60).step_id for future in futures] == [0, 1]
    assert executor.execute(suite.prefill(3, [3], [1, 2])).result(timeout=60).step_id == 3
    executor.close()


def test_close_gives_the_cache_back() -> None:
    engine = Engine()
    engine.executor.execute(suite.prefill(0, [0], [1, 2]))
    engine.close()
    with pytest.raises(RuntimeError, match="the runner is closed"):
        engine.runner.run(suite.prefill(1, [1], [1, 2]))
