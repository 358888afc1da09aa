"""Cores for the threads of a step: which ones are chosen, and that the threads do stay there."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runner_harness import VOCAB_SIZE, TinyNetwork, cache_shape

from quire_interfaces import ConfigError
from quire_kv_cache import plan_kv_cache
from quire_runner import ModelRunner, RunnerConfig, ThreadedExecutor
from quire_runner.affinity import bind_team, choose_cores, parse_cores, split_cores
from quire_testkit.conformance.executor import ExecutorSuite

HERE = sorted(os.sched_getaffinity(0))


def machine(folder: Path, nodes: list[str], siblings: dict[int, str]) -> Path:
    """A machine as Linux describes it in its files."""
    for number, cores in enumerate(nodes):
        (folder / f"node/node{number}").mkdir(parents=True)
        (folder / f"node/node{number}/cpulist").write_text(cores + "\n")
    for core, listed in siblings.items():
        (folder / f"cpu/cpu{core}/topology").mkdir(parents=True)
        (folder / f"cpu/cpu{core}/topology/thread_siblings_list").write_text(listed + "\n")
    return folder


def in_a_thread(work: Callable[[], None]) -> None:
    """Binding is for good: not for the thread that runs the tests."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def test_lists_are_read_as_linux_writes_them() -> None:
    assert parse_cores("0-3,8\n") == [0, 1, 2, 3, 8]
    assert parse_cores("5,1-2,5") == [5, 1, 2]


@pytest.mark.parametrize("value", ["", "a", "1-", "-1", "3-1", "1,,2", "all", 3])
def test_a_value_that_is_no_list_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"cpu_affinity must be auto, none, or cores such as 0-3,8"):
        RunnerConfig(cpu_affinity=value)  # type: ignore[arg-type]


def test_one_node_is_left_alone(tmp_path: Path) -> None:
    system = machine(tmp_path, ["0-7", ""], {})  # the second node has memory only
    assert choose_cores("auto", None, allowed=range(8), system=system) == ()
    assert choose_cores("auto", None, allowed=range(8), system=tmp_path / "nothing") == ()


def test_several_nodes_are_filled_one_after_the_other_physical_cores_first(tmp_path: Path) -> None:
    pairs = {core: f"{core % 4},{core % 4 + 4}" for core in range(8)}
    system = machine(tmp_path, ["0-1,4-5", "2-3,6-7"], pairs)
    assert choose_cores("auto", None, allowed=range(8), system=system) == (0, 1, 2, 3)
    assert choose_cores("auto", 3, allowed=range(8), system=system) == (0, 1, 2)
    assert choose_cores("auto", 6, allowed=range(8), system=system) == (0, 1, 2, 3, 4, 5)
    assert choose_cores("auto", 9, allowed=range(8), system=system) == ()  # more threads than cores: they must share
    assert choose_cores("auto", None, allowed=[1, 4, 6, 7], system=system) == (1, 4, 6, 7)
    assert choose_cores("auto", None, allowed=[0, 1, 4], system=system) == ()  # all on one node
    assert choose_cores("none", None, allowed=range(8), system=system) == ()


def test_a_list_is_taken_as_it_stands() -> None:
    assert choose_cores("3,0-1", None, allowed=range(8)) == (3, 0, 1)
    assert choose_cores("3,0-1", 2, allowed=range(8)) == (3, 0)


@pytest.mark.parametrize(
    ("text", "num_threads", "complaint"),
    [("2,9", None, r"'2,9' names core 9.*may use 0, 1, 2, 3$"), ("0-1", 4, "2 cores for 4 threads")],
)
def test_a_list_that_cannot_be_had_is_refused(text: str, num_threads: int | None, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        choose_cores(text, num_threads, allowed=range(4))


def test_engines_of_one_host_share_no_core(tmp_path: Path) -> None:
    system = machine(tmp_path, ["0-1,4-5", "2-3,6-7"], {core: f"{core % 4},{core % 4 + 4}" for core in range(8)})
    here = {"allowed": range(8), "system": system}
    assert split_cores("auto", 2, **here) == [((0, 1, 4, 5), 2), ((2, 3, 6, 7), 2)], "a node each"
    assert split_cores("auto", 4, **here) == [((core, core + 4), 1) for core in range(4)], "a physical core each"
    assert split_cores("auto", 3, **here) == [((0, 4), 1), ((1, 5), 1), ((2, 6), 1)]
    assert split_cores("4,2,0,6", 2, **here) == [((4, 2), 2), ((0, 6), 2)]
    assert split_cores("none", 2, **here) == [((), 0), ((), 0)]
    assert split_cores("auto", 9, **here) == [((), 0)] * 9, "fewer cores than engines"
    assert split_cores("auto", 2, allowed=(), system=tmp_path / "nothing") == [((), 0)] * 2


def test_each_thread_of_the_team_stays_on_its_core() -> None:
    cores = (HERE[-1], HERE[0])

    def work() -> None:
        before = set(os.listdir("/proc/self/task"))
        bind_team(cores)
        torch.ones(1 << 20).add_(1)
        team = set(os.listdir("/proc/self/task")) - before
        assert os.sched_getaffinity(0) == {cores[0]}
        assert [os.sched_getaffinity(int(thread)) for thread in team] == [{cores[1]}]

    in_a_thread(work)
    assert os.sched_getaffinity(0) == set(HERE)


@pytest.mark.parametrize("threaded", [True, False])
def test_the_steps_run_on_the_cores_asked_for(threaded: bool) -> None:
    seen: list[tuple[set[int], int]] = []
    suite = ExecutorSuite()

    def work() -> None:
        network = TinyNetwork(fail=lambda batch: seen.append((os.sched_getaffinity(0), torch.get_num_threads())))
        specs = network.specs(4)
        config = RunnerConfig(dtype="float32", max_num_seqs=4, max_model_len=16, cpu_affinity=f"{HERE[-1]}")
        plan = plan_kv_cache(specs, num_blocks=20)
        runner = ModelRunner(
            network, plan, config, vocab_size=VOCAB_SIZE, cache_shape=cache_shape, layer_names=tuple(specs)
        )
        assert runner.cores == (HERE[-1],)
        executor = ThreadedExecutor(runner) if threaded else runner
        executor.execute(suite.prefill(0, [0], [1, 2])).result(timeout=30)
        executor.close()

    before = torch.get_num_threads()
    try:
        in_a_thread(work)
    finally:
        torch.set_num_threads(before)
    assert seen == [({HERE[-1]}, 1)]
