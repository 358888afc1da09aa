"""An adapter that is alone for long: it moves into the weights, and out of them without a trace."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from lora_files import HIDDEN, SHAPES, tensors_of, write
from torch import Tensor

from quire_interfaces import SchedulerStats
from quire_lora import AdapterRuntime, AdapterSlots, AdapterStore
from quire_ops.lora import lora_linear

AFTER = 3


class TinyNetwork:
    """Layers by name whose weights may be written over, with adapters on top of them."""

    def __init__(self, *, shared: bool = False) -> None:
        self.slots = AdapterSlots(3, 4, torch.float32, torch.device("cpu"))
        self.weights = {name: torch.randn(shape) for name, shape in SHAPES.items()}
        if shared:
            first, *others = [name for name in SHAPES if name.endswith("q_proj")]
            self.weights |= dict.fromkeys(others, self.weights[first])
        for name, (outputs, inputs) in SHAPES.items():
            weight = self.weights[name]
            base, plain = (lambda weight=weight: (weight.float().clone(), None)), (lambda weight=weight: weight)
            self.slots.linear(name, outputs, inputs, base, plain)
        self.store = AdapterStore(self.slots, lambda name, tensor: [(name, tensor)], max_adapters=8)
        self.device = AdapterRuntime(self.slots, self.store, merge_after=AFTER)
        self.before = {name: weight.clone() for name, weight in self.weights.items()}

    def load(self, folder: Path, tensors: dict[str, Tensor], **fields: object) -> str:
        return self.store.load(folder.name, str(write(folder, tensors, **fields))).result().version

    def step(self, slots: list[int], x: Tensor) -> dict[str, Tensor]:
        """What each layer gives for `x` [N, HIDDEN], by name."""
        rows = np.array(slots, dtype=np.int32)
        merged = self.device.merge_for_step(rows)
        tokens = self.device.tokens_of(np.where(rows == merged, -1, rows))
        out = {name: x @ weight.T for name, weight in self.weights.items()}
        for name, site in self.slots.linears.items():
            if tokens is not None:
                lora_linear(out[name], x, site.weights, tokens)
        return out

    def expected(self, slots: list[int], versions: list[str], x: Tensor) -> dict[str, Tensor]:
        out = {name: x.double() @ weight.double().T for name, weight in self.before.items()}
        for row, slot in enumerate(slots):
            adapter = self.store.adapter(versions[slot]) if slot >= 0 else None
            for name, linear in () if adapter is None else adapter.linears.items():
                out[name][row] += x[row].double() @ linear.a.double().T @ linear.b.double()
        return out

    @property
    def is_untouched(self) -> bool:
        return all(torch.equal(self.weights[name], before) for name, before in self.before.items())


def adapters(network: TinyNetwork, folder: Path, count: int = 3) -> list[str]:
    chooser = random.Random(count)
    versions = []
    for i in range(count):
        names = chooser.sample(sorted(SHAPES), chooser.randrange(1, len(SHAPES) + 1))
        rank = chooser.choice([1, 2, 4])
        target = "|".join(name.replace(".", r"\.") for name in names)
        versions.append(network.load(folder / f"{i}", tensors_of(names, rank), r=rank, target_modules=f"({target})"))
    return versions


@pytest.mark.parametrize("seed", range(6))
def test_results_stay_the_same_whatever_runs(tmp_path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    chooser, network = random.Random(seed), TinyNetwork()
    versions = adapters(network, tmp_path)
    for slot, version in enumerate(versions):
        network.device.place(slot, version)
    for _ in range(60):
        some = chooser.randrange(3)
        slots = (
            [some] * chooser.randrange(1, 4) if chooser.random() < 0.5 else [-1, *chooser.choices(range(-1, 3), k=2)]
        )
        for _ in range(chooser.choice([1, 2, 5, 12])):
            x = torch.randn(len(slots), HIDDEN)
            got, expected = network.step(slots, x), network.expected(slots, versions, x)
            for name, out in got.items():
                torch.testing.assert_close(out.double(), expected[name], rtol=1e-5, atol=1e-5)
            if len(set(slots)) > 1 or slots[0] < 0:
                assert network.is_untouched
    stats = SchedulerStats()
    network.device.add_stats(stats)
    assert stats.num_adapter_merges_total > 5
    network.store.close()


def test_a_merged_adapter_is_nowhere_but_in_the_weights(tmp_path: Path) -> None:
    network = TinyNetwork()
    (version,) = adapters(network, tmp_path, 1)
    network.device.place(1, version)
    num_layers = len(network.store.adapter(version).linears)
    rows = np.array([1, 1], dtype=np.int32)
    for step in range(AFTER - 1 + num_layers):
        assert len(network.slots.weights_before) == max(0, step + 1 - AFTER)
        is_last = step + 1 == AFTER - 1 + num_layers
        assert network.device.merge_for_step(rows) == (1 if is_last else -1)
    # Those who look at the network's weights see its own.
    for name, site in network.slots.linears.items():
        assert torch.equal(site.base()[0], network.before[name])
        assert not site.weights.ranks.any()
    assert not network.is_untouched
    # Its slot goes to another: the weights are as they were, and only the new one is added.
    other = network.load(tmp_path / "other", tensors_of())
    network.device.place(1, other)
    assert network.is_untouched
    x = torch.randn(2, HIDDEN)
    got = network.step([1, -1], x)
    for name, out in network.expected([1, -1], ["", other], x).items():
        torch.testing.assert_close(got[name].double(), out, rtol=1e-5, atol=1e-5)
    network.store.close()


def test_an_adapter_of_another_kind_stays_on_top(tmp_path: Path) -> None:
    scaled, shared = TinyNetwork(), TinyNetwork(shared=True)
    magnitudes = {f"base_model.model.{name}.lora_magnitude_vector": torch.rand(SHAPES[name][0]) for name in SHAPES}
    cases = (
        (scaled, scaled.load(tmp_path / "dora", tensors_of() | magnitudes, use_dora=True)),
        (shared, shared.load(tmp_path / "plain", tensors_of())),
    )
    for network, version in cases:
        network.device.place(0, version)
        for _ in range(20):
            assert network.device.merge_for_step(np.array([0], dtype=np.int32)) == -1
        assert network.is_untouched
        network.store.close()


def test_steps_do_not_wait_for_who_reads_weights(tmp_path: Path) -> None:
    network = TinyNetwork()
    (version,) = adapters(network, tmp_path, 1)
    network.device.place(0, version)
    reading, go_on = threading.Event(), threading.Event()

    def read() -> None:
        with network.slots.weights_lock:
            reading.set()
            assert go_on.wait(60)

    reader = threading.Thread(target=read)
    reader.start()
    assert reading.wait(60)
    for _ in range(20):
        network.device.merge_for_step(np.array([0], dtype=np.int32))
        network.device.merge_for_step(np.array([0, 0], dtype=np.int32))
    assert network.is_untouched
    network.device.merge_for_step(np.array([0, -1], dtype=np.int32))
    go_on.set()
    reader.join()
    network.store.close()


def test_adapters_stay_on_top_of_weights_in_another_form() -> None:
    slots = AdapterSlots(1, 4, torch.float32, torch.device("cpu"))
    slots.linear("q_proj", 4, HIDDEN, lambda: (torch.zeros(4, HIDDEN), None))
    store = AdapterStore(slots, lambda name, tensor: [(name, tensor)], max_adapters=1)
    device = AdapterRuntime(slots, store, merge_after=1)
    assert not slots.has_plain_weights
    assert device.merge_for_step(np.array([0], dtype=np.int32)) == -1
    store.close()
