"""The store: names, versions, what stays in memory; and slots that are filled again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lora_files import SHAPES, make_slots, tensors_of, write

from quire_interfaces import CheckpointError, ModelNotFoundError, RequestError
from quire_lora import AdapterRuntime, AdapterStore


def make_store(max_adapters: int = 2) -> AdapterStore:
    return AdapterStore(make_slots(), lambda name, tensor: [(name, tensor)], max_adapters=max_adapters)


def test_a_name_may_come_to_stand_for_another_version(tmp_path: Path) -> None:
    store, folder = make_store(), write(tmp_path / "a", tensors_of())
    first = store.load("style", str(folder)).result()
    assert (first.name, first.path, first.rank) == ("style", str(folder), 2)
    with pytest.raises(RequestError, match="'style' is loaded already") as caught:
        store.load("style", str(folder)).result()
    assert caught.value.code == "adapter_exists"
    store.hold(first.version)
    write(folder, tensors_of())
    second = store.load("style", str(folder), replace=True).result()
    assert second.version != first.version == store.loaded()[0].version or store.resolve("style") == second.version
    # Whoever runs with the first one keeps it.
    assert store.adapter(first.version) is not store.adapter(second.version)
    store.drop(first.version)
    with pytest.raises(RuntimeError, match="not in host memory"):
        store.adapter(first.version)
    store.unload("style")
    for call in (store.resolve, store.unload):
        with pytest.raises(ModelNotFoundError, match="no adapter 'style' is loaded; loaded: none"):
            call("style")
    store.close()


def test_memory_keeps_the_last_used_and_reads_the_others_again(tmp_path: Path) -> None:
    store = make_store(max_adapters=2)
    infos = [store.load(f"a{i}", str(write(tmp_path / f"{i}", tensors_of()))).result() for i in range(4)]
    assert store.num_in_memory == 2
    assert [info.name for info in store.loaded()] == ["a0", "a1", "a2", "a3"]
    before = store.num_loads_total
    store.hold(infos[0].version)
    store.fetch(infos[0].version).result()
    assert store.num_loads_total == before + 1
    assert store.adapter(infos[0].version).rank == 2
    for info in infos[1:]:
        store.fetch(info.version).result()
    assert store.adapter(infos[0].version)  # it is held
    write(tmp_path / "1", tensors_of())
    store.drop(infos[0].version)
    store.fetch(infos[2].version).result()
    with pytest.raises(RequestError, match="have changed since it was loaded"):
        store.fetch(infos[1].version).result()
    store.close()


def test_equal_files_are_one_version(tmp_path: Path) -> None:
    store, tensors = make_store(), tensors_of()
    versions = {store.load(name, str(write(tmp_path / name, tensors))).result().version for name in ("one", "other")}
    assert len(versions) == 1
    assert store.num_loads_total == 1
    store.unload("one")
    assert store.adapter(store.resolve("other")).rank == 2
    store.close()


def test_a_folder_that_is_none_is_the_callers_error(tmp_path: Path) -> None:
    store = make_store()
    with pytest.raises(CheckpointError, match="is no adapter in PEFT's format"):
        store.load("x", str(tmp_path)).result()
    assert store.loaded() == []
    store.close()


def test_a_slot_holds_nothing_of_what_was_in_it(tmp_path: Path) -> None:
    slots = make_slots()
    store = AdapterStore(slots, lambda name, tensor: [(name, tensor)], max_adapters=4)
    wide = store.load("wide", str(write(tmp_path / "w", tensors_of(rank=4), r=4, bias="lora_only"))).result()
    one = next(iter(SHAPES))
    narrow = store.load("narrow", str(write(tmp_path / "n", tensors_of([one]), target_modules=one.replace(".", r"\."))))
    device = AdapterRuntime(slots, store)
    device.place(1, wide.version)
    assert slots.versions == [None, wide.version]
    device.place(1, narrow.result().version)
    for name, site in slots.linears.items():
        rank = 2 if name == one else 0
        assert site.weights.ranks.tolist() == [0, rank]
        assert not site.weights.a[1, rank:].any()
        assert not site.weights.b[1, rank:].any()
        assert not site.weights.a[0].any()
        assert bool(site.weights.a[1, :rank].any()) == bool(rank)
    assert site.weights.a.dtype == torch.float32
    store.close()
