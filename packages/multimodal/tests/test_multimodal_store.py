"""The store: nothing is lost while it is used, nothing stays when it is not wanted, nothing outlives its owner."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quire_multimodal.store as store_module
from quire_interfaces import MediaItem, Modality, OverloadedError
from quire_multimodal import MediaStore, StoredItem, read_features
from quire_multimodal.store import write_features


def put(store: MediaStore, key: str, num_bytes: int = 1000) -> StoredItem:
    """An item of so many bytes, with one user."""
    features, written = write_features(store.path(key), {"pixel_values": np.zeros(num_bytes, np.uint8)})
    item = MediaItem(
        modality=Modality.IMAGE, key=key, num_embeds=1, path=str(store.path(key)), features=tuple(features)
    )
    stored = StoredItem(item, "", (), {}, written)
    store.add(stored)
    return stored


def test_arrays_come_back_as_they_were(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    arrays = {
        "pixel_values": generator.random((3, 5, 7), np.float32),
        "mask": generator.integers(0, 2, (4, 3)).astype(bool),
        "grid": np.array([[1, 2, 3]], np.int64),
        "none": np.empty((0, 4), np.float32),
        "half": generator.random(9).astype(np.float16),
        "number": np.array(5.0),
    }
    features, num_bytes = write_features(tmp_path / "item", arrays)
    assert (tmp_path / "item").stat().st_size == num_bytes
    assert all(each.offset % 64 == 0 for each in features)
    item = MediaItem(
        modality=Modality.IMAGE, key="", num_embeds=1, path=str(tmp_path / "item"), features=tuple(features)
    )
    back = read_features(item)
    (tmp_path / "item").unlink()  # what is mapped stays
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)
        assert back[name].dtype == array.dtype
        assert not back[name].flags.writeable


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    store = MediaStore(3 * 1024, tmp_path)
    for key in "abc":
        put(store, key)
        store.release(key)
    assert store.acquire("a") is not None
    store.release("a")
    put(store, "d")
    store.release("d")
    assert [key for key in "abcd" if store.acquire(key)] == ["a", "c", "d"]
    assert not store.path("b").exists()
    store.check_integrity()
    store.close()


def test_what_is_in_use_stays(tmp_path: Path) -> None:
    store = MediaStore(0, tmp_path)
    stored = put(store, "a")
    assert store.acquire("a") == stored
    store.release("a")
    assert read_features(stored.item)["pixel_values"].shape == (1000,)
    store.release("a")
    assert store.acquire("a") is None
    assert store.num_bytes == 0
    store.close()


def test_too_much_in_use_is_refused(tmp_path: Path) -> None:
    store = MediaStore(0, tmp_path)
    store.max_bytes = 2500
    put(store, "a")
    put(store, "b")
    with pytest.raises(OverloadedError, match="full of items in use"):
        put(store, "c")
    assert not store.path("c").exists()
    store.check_integrity()
    store.release("a")
    put(store, "c")
    store.close()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("uprc"), st.integers(0, 5)), max_size=40))
def test_counts_and_files_agree(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]) -> None:
    store = MediaStore(2500, tmp_path_factory.getbasetemp())
    users = dict.fromkeys(range(6), 0)
    for what, key in steps:
        if what == "p" and store.acquire(str(key)) is None:
            put(store, str(key))
            users[key] += 1
        elif what in "up":
            users[key] += what == "p" or store.acquire(str(key)) is not None
        elif what == "r" and users[key]:
            store.release(str(key))
            users[key] -= 1
        elif what == "c":
            store.clear()
        store.check_integrity()
        assert all(store.path(str(key)).exists() for key, count in users.items() if count)
        unused = sum(1024 for key, count in users.items() if not count and store.path(str(key)).exists())
        assert unused == 0 or what != "r" or store.num_bytes <= max(2500, 1024 * sum(map(bool, users.values())))
    store.close()
    assert not store.folder.exists()


def test_thousands_of_items_stay_within_the_bound(tmp_path: Path) -> None:
    store = MediaStore(20 * 1024, tmp_path)
    for index in range(3000):
        put(store, str(index), 900)
        store.release(str(index))
    assert store.num_bytes <= 20 * 1024
    assert len(store) == len(list(store.folder.iterdir())) <= 21
    store.close()
    assert list(tmp_path.iterdir()) == []


OWNER = """
import sys, time
from pathlib import Path
from quire_multimodal import MediaStore
store = MediaStore(1000, Path(sys.argv[1]))
store.path("left").write_bytes(b"x" * 100)
print(store.folder.name, flush=True)
time.sleep(600)
"""


def test_folders_of_the_dead_are_swept_and_those_of_the_living_stay(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    left = tmp_path / owner.stdout.readline().strip()
    other = MediaStore(1000, tmp_path)
    assert left.exists(), "its owner lives"
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert left.exists()
    mine = MediaStore(1000, tmp_path)
    assert not left.exists()
    assert set(tmp_path.iterdir()) == {other.folder, mine.folder}
    assert (other.folder.stat().st_mode & 0o777) == 0o700
    other.close()
    mine.close()
    assert list(tmp_path.iterdir()) == []


def test_without_enough_shared_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 20))
    with caplog.at_level(logging.WARNING):
        store = MediaStore(2 << 30)
    assert store.folder.parent != Path("/dev/shm")
    assert "64 MiB free" in caplog.text
    store.close()
