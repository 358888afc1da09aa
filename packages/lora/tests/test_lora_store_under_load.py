"""The store and the slots while adapters come and go in any order: loaded, renamed, held, evicted, placed."""

from __future__ import annotations

import tempfile
import threading
from collections import Counter, OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from lora_files import make_slots, tensors_of, write

from quire_interfaces import ModelNotFoundError, RequestError
from quire_lora import AdapterRuntime, AdapterSlots, AdapterStore

NUM_FILES, NUM_SLOTS, MAX_ADAPTERS = 4, 2, 2
names = st.sampled_from(["one", "two", "three"])
files = st.integers(0, NUM_FILES - 1)


def make_store(slots: AdapterSlots) -> AdapterStore:
    return AdapterStore(slots, lambda name, tensor: [(name, tensor)], max_adapters=MAX_ADAPTERS)


class StoreUnderLoad(RuleBasedStateMachine):
    """A store of two adapters in memory and a device of two slots, beside dictionaries that say what they hold."""

    @initialize()
    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.slots = make_slots(NUM_SLOTS)
        self.store = make_store(self.slots)
        self.runtime = AdapterRuntime(self.slots, self.store)
        self.tensors = [tensors_of(rank=1 + i) for i in range(NUM_FILES)]
        self.paths = [
            str(write(Path(self.folder.name) / f"{i}", tensors, r=1 + i)) for i, tensors in enumerate(self.tensors)
        ]
        self.version_of: dict[int, str] = {}
        """File -> version, of those that were loaded once."""
        self.named: dict[str, int] = {}
        self.holds: Counter[int] = Counter()
        self.used: OrderedDict[int, None] = OrderedDict()
        """Files that the store knows, the least recently used first."""
        self.in_memory: set[int] = set()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.folder.cleanup()

    def use(self, file: int) -> None:
        """A file's adapter is read, or used again."""
        self.in_memory.add(file)
        self.used[file] = None
        self.used.move_to_end(file)

    def clean(self, just_used: int | None = None) -> None:
        """Forget what has neither name nor hold, then the oldest in memory that nobody holds, beyond the bound."""
        for file in [file for file in self.used if not self.holds[file] and file not in self.named.values()]:
            del self.used[file]
            self.in_memory.discard(file)
        oldest = [file for file in self.used if file in self.in_memory]
        for file in oldest[: max(0, len(oldest) - MAX_ADAPTERS)]:
            if not self.holds[file] and file != just_used:
                self.in_memory.discard(file)

    @rule(name=names, file=files, replace=st.booleans())
    def load(self, name: str, file: int, replace: bool) -> None:
        """Give a name to a file's adapter."""
        loading = self.store.load(name, self.paths[file], replace=replace)
        if name in self.named and not replace:
            with pytest.raises(RequestError, match="is loaded already"):
                loading.result()
            return
        info = loading.result()
        assert (info.name, info.path, info.rank) == (name, self.paths[file], 1 + file)
        assert self.version_of.setdefault(file, info.version) == info.version
        self.named[name] = file
        self.use(file)
        self.clean(just_used=file)

    @rule(name=names)
    def unload(self, name: str) -> None:
        """Take a name away; who holds the adapter keeps it."""
        if name in self.named:
            self.store.unload(name)
            del self.named[name]
            self.clean()
        else:
            with pytest.raises(ModelNotFoundError, match=f"no adapter '{name}' is loaded"):
                self.store.unload(name)

    @rule(name=names, slot=st.integers(0, NUM_SLOTS - 1))
    def begin_request(self, name: str, slot: int) -> None:
        """A request takes what its name stands for now, has it read again if need be, and gets a slot."""
        if name not in self.named:
            return
        file = self.named[name]
        version = self.store.resolve(name)
        self.store.hold(version)
        self.holds[file] += 1
        self.store.fetch(version).result()
        was_in_memory = file in self.in_memory
        self.use(file)
        if not was_in_memory:
            self.clean(just_used=file)
        self.runtime.place(slot, version)
        for layer, site in self.slots.linears.items():
            assert site.weights is not None
            assert int(site.weights.ranks[slot]) == 1 + file
            read = self.tensors[file][f"base_model.model.{layer}.lora_A.weight"]
            assert torch.equal(site.weights.a[slot, : 1 + file], read)
            assert not site.weights.a[slot, 1 + file :].any()

    @rule(file=files)
    def end_request(self, file: int) -> None:
        """A request ends; its adapter may be evicted, and the slot keeps what it has."""
        if self.holds[file]:
            self.holds[file] -= 1
            self.store.drop(self.version_of[file])
            self.clean()

    @invariant()
    def what_is_in_memory(self) -> None:
        if not hasattr(self, "store"):
            return
        assert self.store.num_in_memory == len(self.in_memory)
        for file, version in self.version_of.items():
            if file in self.in_memory:
                assert self.store.adapter(version).rank == 1 + file
            else:
                with pytest.raises(RuntimeError, match="is not in host memory"):
                    self.store.adapter(version)
        assert {info.name: info.version for info in self.store.loaded()} == {
            name: self.version_of[file] for name, file in self.named.items()
        }


StoreUnderLoad.TestCase.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
TestStoreUnderLoad = StoreUnderLoad.TestCase


def test_threads_that_hold_and_drop_never_lose_what_they_hold(tmp_path: Path) -> None:
    store = make_store(make_slots())
    paths = [write(tmp_path / f"{i}", tensors_of(rank=1 + i), r=1 + i) for i in range(NUM_FILES)]
    versions = [store.load(f"a{i}", str(path)).result().version for i, path in enumerate(paths)]
    ranks: list[int] = []

    def run(first: int) -> None:
        for i in range(8):
            file = (first + i) % NUM_FILES
            store.hold(versions[file])
            store.fetch(versions[file]).result()
            ranks.append(store.adapter(versions[file]).rank - file)
            store.drop(versions[file])

    threads = [threading.Thread(target=run, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ranks == [1] * 32
    assert store.num_in_memory <= MAX_ADAPTERS
    store.close()
