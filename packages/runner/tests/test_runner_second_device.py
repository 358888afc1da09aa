"""On `cuda:1` every thread that works with the device is at the second one when it does: streams, captures, kernels.

A thread of CUDA is at the first device until it says otherwise, and Triton launches where its thread is, whatever its
tensors say. Here tensors are fake, with a device and without numbers (as in `test_runner_device_waits.py`), in all
threads; a dispatch mode in each, and what stands in the place of torch.cuda, note where the thread is.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from runner_graph_network import add_torch_networks
from runner_harness import random_model
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire_interfaces import NewRow, SamplingParams, SchedulerOutput, platforms
from quire_interfaces.platforms import CUDA
from quire_kv_cache import plan_kv_cache
from quire_models.staged_uploads import StagedUploads
from quire_ops import staging
from quire_runner import ModelRunner, RunnerConfig, ThreadedExecutor

BLOCK, NUM_ROWS = 4, 2


class Devices(ModuleType):
    """In the place of `torch.cuda`: where each thread is, and what it did there."""

    def __init__(self) -> None:
        super().__init__("second_device")
        self._own = threading.local()
        self.lock = threading.RLock()
        """Of the thread whose operations run: while one does, fake tensors have another device in all threads."""
        self.uses: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
        """What was done -> (start of the thread's name, device)."""

    def set_device(self, device: int) -> None:
        self._own.index = device

    def is_available(self) -> bool:
        return True

    def mem_get_info(self, device: str) -> tuple[int, int]:
        assert device == "cuda:1"
        return 1 << 40, 1 << 40

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802
        return Stream(self, device)

    current_stream = Stream
    stream = staticmethod(nullcontext)

    def note(self, what: str) -> None:
        name = threading.current_thread().name.partition("_")[0]
        self.uses[what].add((name, getattr(self._own, "index", 0)))


class Stream:
    """Nothing runs beside anything."""

    def __init__(self, devices: Devices, device: torch.device) -> None:
        assert device == torch.device("cuda:1")
        self._devices = devices
        devices.note("stream")

    def wait_stream(self, other: Stream) -> None:
        self._devices.note("wait")

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None:
        pass


class Launches(TorchDispatchMode):
    """Notes operations on tensors of a device."""

    def __init__(self, devices: Devices) -> None:
        super().__init__()
        self._devices = devices

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self._devices.lock:
            out = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, Tensor)]
        if any(each.device.type == "cuda" for each in tensors):
            self._devices.note("kernel")
        return out


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    found = Devices()
    platform = replace(CUDA, module=found.__name__)
    monkeypatch.setitem(sys.modules, found.__name__, found)
    monkeypatch.setitem(platforms.PLATFORMS, "cuda", platform)
    monkeypatch.setitem(platforms._of_types, "cuda", platform)
    fake, run = FakeTensorMode(allow_non_fake_inputs=True), threading.Thread.run

    @contextmanager
    def watched() -> Iterator[None]:
        with fake, Launches(found):
            yield

    def run_watched(thread: threading.Thread) -> None:
        with watched():
            run(thread)

    monkeypatch.setattr(threading.Thread, "run", run_watched)
    with watched():
        yield found
    staging._copy_stream.cache_clear()


def steps(params: SamplingParams) -> list[SchedulerOutput]:
    """A prompt of each row, then decodes."""
    rows = list(range(NUM_ROWS))
    new = [
        NewRow(
            row=row, request_id=str(row), token_ids=[5, 6, 7], num_prompt_tokens=3, num_computed_tokens=0,
            block_ids=([1 + 2 * row, 2 + 2 * row],), sampling_params=params, seed=row, stop_token_ids=frozenset(),
        )
        for row in rows
    ]  # fmt: skip
    return [
        SchedulerOutput(
            step_id=step_id,
            rows=rows,
            request_ids=[str(row) for row in rows],
            num_computed_tokens=[0 if step_id == 0 else 2 + step_id] * NUM_ROWS,
            num_scheduled_tokens=[1 if step_id else 3] * NUM_ROWS,
            samples=[True] * NUM_ROWS,
            total_num_scheduled_tokens=NUM_ROWS * (1 if step_id else 3),
            new_rows=[] if step_id else new,
        )
        for step_id in range(4)
    ]


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_every_thread_is_at_the_device_it_works_with(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, *, enforce_eager: bool
) -> None:
    add_torch_networks(monkeypatch, with_prompts=True)

    def capture(step: Callable[[], tuple[Tensor, ...]]) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        devices.note("capture")
        return partial(devices.note, "replay"), step()

    model = random_model("qwen3", device="cuda:1")
    plan = plan_kv_cache(model.config.kv_cache_specs(BLOCK, "float32"), num_blocks=16)
    config = RunnerConfig(
        device="cuda:1", dtype="float32", max_num_seqs=NUM_ROWS, max_model_len=32, max_num_batched_tokens=16,
        enforce_eager=enforce_eager,
    )  # fmt: skip
    runner = ModelRunner.for_model(model, plan, config, capture=capture)
    devices.set_device(0)  # as a caller does who works with another device, too
    executor = ThreadedExecutor(runner, reads_apart=True)
    executor.prepare(partial(runner.warm_up, 1e9))
    for step in steps(SamplingParams(temperature=0.7)):
        wait([executor.execute(step)])
    assert enforce_eager or (runner.graphs is not None and runner.graphs.failure is None)
    executor.close()
    captured = set() if enforce_eager else {("quire-runner", 1)}
    assert devices.uses["capture"] == devices.uses["replay"] == captured
    assert {place for place in devices.uses["kernel"] if place[0] != "MainThread"} == {("quire-runner", 1)}
    assert {place for place in devices.uses["stream"] if place[0] != "MainThread"} == {("quire-runner", 1)}


def test_graphs_are_prepared_at_the_device(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    add_torch_networks(monkeypatch)

    def capture(step: Callable[[], tuple[Tensor, ...]]) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        return partial(devices.note, "replay"), step()

    model = random_model("qwen3", device="cuda:1")
    plan = plan_kv_cache(model.config.kv_cache_specs(BLOCK, "float32"), num_blocks=16)
    config = RunnerConfig(device="cuda:1", dtype="float32", max_num_seqs=NUM_ROWS, max_model_len=32)
    with torch.inference_mode():
        runner = ModelRunner.for_model(model, plan, config, capture=capture)
        for step in steps(SamplingParams(temperature=0.0)):
            with devices.lock:
                runner.launch(step)
            assert runner.graphs is not None
            runner.graphs.wait()
    runner.close()
    assert {place for place in devices.uses["kernel"] if place[0] == "quire-graphs"} == {("quire-graphs", 1)}


def test_weights_are_uploaded_at_the_device(devices: Devices) -> None:
    random_model("qwen3", device="cuda:1")  # the thread that builds a network
    devices.uses.clear()
    uploads = StagedUploads(torch.device("cuda:1"))
    uploads.upload(torch.zeros(3, 4), torch.float32)
    uploads.finish()
    assert devices.uses["stream"] == devices.uses["wait"] == devices.uses["kernel"] == {("MainThread", 1)}
