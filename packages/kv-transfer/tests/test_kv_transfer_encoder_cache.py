"""Encoder outputs in the disk tier: found by other processes and after restarts, bounded with the blocks, checked."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire_kv_transfer import DiskEncoderCache, DiskTier, FolderUsage, TierFolder, model_fingerprint

WIDTH = 4
MakeCache = Callable[..., DiskEncoderCache]


@pytest.fixture
def make_cache(tmp_path: Path) -> Iterator[MakeCache]:
    caches: list[DiskEncoderCache] = []

    def make(towers: str = "a", size_bytes: int = 10 << 20, dtype: str = "bfloat16") -> DiskEncoderCache:
        tier = DiskTier(str(tmp_path / "tier"), model_fingerprint({"model": "m"}), [100], size_bytes=size_bytes)
        fingerprint = model_fingerprint({"towers": towers})
        caches.append(tier.make_encoder_cache(fingerprint, dtype=dtype, width=WIDTH))
        return caches[-1]

    yield make
    for cache in caches:
        cache.close()


def embeds(number: int, num_embeds: int) -> memoryview:
    """Bytes of so many embeddings in bfloat16."""
    return memoryview(number.to_bytes(2, "little") * WIDTH * num_embeds)


def save(cache: DiskEncoderCache, number: int, num_embeds: int = 3) -> None:
    cache.save_item(f"key {number}", b"item %d" % number)
    cache.save_embeds(f"key {number}", embeds(number, num_embeds))
    cache.flush()


def test_what_was_kept_is_found_after_a_restart(make_cache: MakeCache) -> None:
    cache = make_cache()
    assert cache.load_embeds("key 1", 3) is None
    assert cache.load_item("key 1") is None
    cache.save_item("key 1", b"item 1")
    cache.save_embeds("key 1", embeds(1, 3))
    cache.close()
    cache = make_cache()
    assert cache.load_embeds("key 1", 3) == embeds(1, 3)
    assert cache.load_item("key 1") == b"item 1"


def test_closing_is_the_end(make_cache: MakeCache) -> None:
    cache = make_cache()
    cache.close()
    cache.close()
    save(cache, 1)
    assert make_cache().load_item("key 1") is None
    assert make_cache().load_embeds("key 1", 3) is None


def test_other_towers_have_others(make_cache: MakeCache) -> None:
    save(make_cache(), 1)
    assert make_cache("b").load_embeds("key 1", 3) is None
    assert make_cache("b").load_item("key 1") is None


def test_another_process_finds_it_by_its_address(make_cache: MakeCache) -> None:
    cache = make_cache()
    save(cache, 1)
    code = """
import json, sys
from quire_kv_transfer import DiskEncoderCache
cache = DiskEncoderCache.at(json.loads(sys.argv[1]))
assert (cache.dtype, cache.width) == ("bfloat16", 4)
assert cache.load_item("key 1") == b"item 1"
print(cache.load_embeds("key 1", 3).hex())
cache.save_embeds("key 2", memoryview(b"ab" * 4))  # written when the process ends, without a word
"""
    command = [sys.executable, "-c", code, json.dumps(cache.address)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert bytes.fromhex(output) == embeds(1, 3)
    assert cache.load_embeds("key 2", 1) == b"ab" * 4


def test_files_that_are_not_what_they_should_be_are_removed(
    make_cache: MakeCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = make_cache()
    for number in (1, 2, 3):
        save(cache, number)
    contents = {bytes(embeds(number, 3)): number for number in (1, 2, 3)}
    paths = {contents[path.read_bytes()[128:]]: path for path in tmp_path.rglob("*-0.kv")}
    data = bytearray(paths[1].read_bytes())
    data[-1] ^= 1
    paths[1].write_bytes(data)
    paths[2].write_bytes(paths[3].read_bytes())
    with caplog.at_level(logging.WARNING):
        assert cache.load_embeds("key 1", 3) is None
        assert cache.load_embeds("key 2", 3) is None
        assert cache.load_embeds("key 3", 4) is None  # not as many as its item has
    assert [word in caplog.text for word in ("checksum", "another block", "should have")] == [True] * 3
    assert not any(path.exists() for path in paths.values())
    assert cache.load_item("key 1") == b"item 1"
    save(cache, 1)
    assert cache.load_embeds("key 1", 3) == embeds(1, 3)


def test_the_bound_of_the_folder_holds_and_what_was_used_last_stays(make_cache: MakeCache, tmp_path: Path) -> None:
    cache = make_cache(size_bytes=20 * 4096)
    for number in range(30):
        save(cache, number)
        assert cache.load_embeds("key 0", 3) == embeds(0, 3)
        num_bytes = sum(-(-path.stat().st_size // 4096) * 4096 for path in tmp_path.rglob("*.kv"))
        assert num_bytes <= 20 * 4096
    assert cache.load_embeds("key 29", 3) == embeds(29, 3)
    assert cache.load_embeds("key 1", 3) is None


def test_a_disk_that_fails_switches_it_off_with_one_line(
    make_cache: MakeCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = make_cache()
    save(cache, 1)
    folder = next(tmp_path.rglob("*-0.kv")).parent.parent
    folder.rename(tmp_path / "elsewhere")
    folder.write_text("no folder")
    with caplog.at_level(logging.WARNING):
        for number in (2, 3):
            save(cache, number)
    assert len(caplog.records) == 1
    assert "switched off" in caplog.text
    assert cache.load_embeds("key 1", 3) is None
    assert cache.load_item("key 1") is None


def test_what_waits_for_the_disk_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings that come while too many wait are not kept; the first are, however many."""
    monkeypatch.setattr("quire_kv_transfer.encoder_cache._MAX_WAITING_BYTES", 100)
    usage = FolderUsage(str(tmp_path))
    cache = DiskEncoderCache(TierFolder(str(tmp_path), bytes(32)), usage, dtype="bfloat16", width=WIDTH)
    with usage._lock:  # the disk takes nothing
        cache.save_embeds("key 1", embeds(1, 1000))
        cache.save_embeds("key 2", embeds(2, 1))
        assert cache.load_embeds("key 1", 1000) == embeds(1, 1000)
    cache.flush()
    cache.save_embeds("key 3", embeds(3, 1))
    cache.flush()
    assert cache.load_embeds("key 1", 1000) == embeds(1, 1000)
    assert cache.load_embeds("key 2", 1) is None
    assert cache.load_embeds("key 3", 1) == embeds(3, 1)
    cache.close()
