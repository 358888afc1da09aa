"""The disk tier in use: restarts, damaged and foreign files, disks that fail or hang, two engines on one folder."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire_interfaces import BlockKey, BlockTransfer, ConfigError, KVTransferJob, KVTransferPlan
from quire_kv_transfer import (
    BlockFiles,
    DiskTier,
    FolderUsage,
    HostMemoryTier,
    TierConnector,
    TierFolder,
    TierStack,
    TierWorker,
    model_fingerprint,
)
from quire_testkit.conformance.kv_transfer import LayeredMemory

BLOCK_BYTES = (48, 40)
FINGERPRINT = model_fingerprint({"model": "a"})
MakeTier = Callable[..., tuple[DiskTier, TierWorker]]


def key(number: int, group: int = 0) -> BlockKey:
    return BlockKey(group, number.to_bytes(4, "big") * 8)


@pytest.fixture
def memory() -> LayeredMemory:
    return LayeredMemory(64)


@pytest.fixture
def make_tier(tmp_path: Path, memory: LayeredMemory) -> Iterator[MakeTier]:
    workers = []

    def make(size_bytes: int = 10 << 20, fingerprint: bytes = FINGERPRINT) -> tuple[DiskTier, TierWorker]:
        tier = DiskTier(str(tmp_path / "tier"), fingerprint, BLOCK_BYTES, size_bytes=size_bytes)
        workers.append(tier.make_worker(memory))
        return tier, workers[-1]

    yield make
    for worker in workers:
        worker.close()


def wait_for(worker: TierWorker, job_id: int) -> list[bool]:
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        output = worker.poll(waits=True)
        if output is not None and job_id in output.finished:
            worker.begin(KVTransferPlan(acknowledged=[job_id]))
            return output.finished[job_id]
    raise AssertionError("the job did not end")


def job(job_id: int, *blocks: tuple[BlockKey, int]) -> KVTransferJob:
    return KVTransferJob(job_id, tuple(BlockTransfer(*block) for block in blocks))


def store(worker: TierWorker, memory: LayeredMemory, *numbers: int) -> list[bool]:
    """Store block n's own content under key n."""
    for number in numbers:
        memory.fill(0, 1, number)
        worker.begin(KVTransferPlan(stores=[job(number, (key(number), 1))]))
    return [wait_for(worker, number)[0] for number in numbers]


def load(worker: TierWorker, *numbers: int) -> list[bool]:
    worker.begin(KVTransferPlan(loads=[job(1000, *[(key(number), 2 + i) for i, number in enumerate(numbers)])]))
    return wait_for(worker, 1000)


def files(tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.rglob("*.kv"))


def content(number: int) -> list[bytes]:
    return LayeredMemory(1).fill(0, 0, number)


def test_a_restart(make_tier: MakeTier, memory: LayeredMemory) -> None:
    _, worker = make_tier()
    memory.fill(0, 1, 7)
    worker.begin(KVTransferPlan(stores=[job(0, (key(7), 1))]))
    worker.close()
    tier, worker = make_tier()
    assert tier.connector.contains(key(7))
    assert load(worker, 7) == [True]
    assert memory.read(0, 2) == content(7)


def test_another_model_does_not_see_it(make_tier: MakeTier, memory: LayeredMemory) -> None:
    _, worker = make_tier()
    store(worker, memory, 7)
    other, other_worker = make_tier(fingerprint=model_fingerprint({"model": "b"}))
    assert not other.connector.contains(key(7))
    assert load(other_worker, 7) == [False]


def test_a_damaged_file_is_removed_with_one_line(
    make_tier: MakeTier, memory: LayeredMemory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier, worker = make_tier()
    store(worker, memory, 1, 2, 3, 4)
    damaged = files(tmp_path)
    damaged[0].write_bytes(damaged[0].read_bytes()[:-1] + b"\xff")
    os.truncate(damaged[1], 50)
    damaged[2].write_bytes(damaged[3].read_bytes())
    with caplog.at_level(logging.WARNING):
        assert load(worker, 1, 2, 3, 4) == [False, False, False, True]
    assert len(caplog.records) == 3
    assert "checksum" in caplog.text
    assert "50 bytes" in caplog.text
    assert "another block" in caplog.text
    assert files(tmp_path) == damaged[3:]
    assert memory.read(0, 5) == content(4)
    assert store(worker, memory, 1) == [True], "it can be stored again"
    assert tier.connector.contains(key(1))


def test_a_foreign_file_under_a_blocks_name(
    make_tier: MakeTier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier, worker = make_tier()
    path = Path(TierFolder(tier.root, FINGERPRINT).path(key(1)))
    path.parent.mkdir(parents=True)
    path.write_text("Dear diary")
    assert tier.connector.contains(key(1))
    assert load(worker, 1) == [False]
    assert not path.exists()
    assert len(caplog.records) == 1


def test_a_disk_that_takes_no_more_switches_the_tier_off(
    make_tier: MakeTier, memory: LayeredMemory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, worker = make_tier()
    (tmp_path / "tier" / FINGERPRINT.hex()[:16]).write_text("where the folder should be")
    assert store(worker, memory, 1, 2, 3) == [False] * 3
    assert len(caplog.records) == 1
    assert "switched off" in caplog.text
    output = worker.poll()
    assert output is not None
    assert output.stopped
    assert load(worker, 1) == [False]


def test_a_folder_that_is_removed_meanwhile_is_made_again(
    make_tier: MakeTier, memory: LayeredMemory, tmp_path: Path
) -> None:
    _, worker = make_tier()
    store(worker, memory, 1)
    os.rename(tmp_path / "tier", tmp_path / "gone")
    assert load(worker, 1) == [False]
    assert store(worker, memory, 2) == [True]
    assert load(worker, 2) == [True]


def test_a_disk_that_hangs_is_late_and_not_waited_for(tmp_path: Path, memory: LayeredMemory) -> None:
    """A named pipe stands for the file: opening it hangs until somebody opens its other end."""
    folder = TierFolder(str(tmp_path), FINGERPRINT)
    worker = TierStack([BlockFiles(folder, FolderUsage(str(tmp_path)))], FINGERPRINT, BLOCK_BYTES).make_worker(
        memory, late_after_s=0.05
    )
    pipe = folder.path(key(1))
    os.makedirs(os.path.dirname(pipe))
    os.mkfifo(pipe)
    worker.begin(KVTransferPlan(loads=[job(5, (key(1), 2))]))
    deadline_s = time.monotonic() + 20
    while (output := worker.poll(waits=True)) is None:
        assert time.monotonic() < deadline_s
    assert (output.late, output.finished) == ([5], {})
    with open(pipe, "wb"):
        assert wait_for(worker, 5) == [False]
    assert worker.poll() is None
    worker.close()


@pytest.mark.parametrize("num_blocks", [1, 5])
def test_the_bound_holds_and_the_least_recently_used_go(
    make_tier: MakeTier, memory: LayeredMemory, tmp_path: Path, num_blocks: int
) -> None:
    bound = num_blocks * 4096
    _, worker = make_tier(size_bytes=bound)
    for number in range(20):
        assert store(worker, memory, number) == [True]
        assert len(files(tmp_path)) <= num_blocks
        if number == num_blocks:
            load(worker, number)
    assert load(worker, *range(20)) == [False] * (20 - num_blocks) + [True] * num_blocks


def test_reading_keeps_a_block(make_tier: MakeTier, memory: LayeredMemory) -> None:
    _, worker = make_tier(size_bytes=4 * 4096)
    store(worker, memory, 0)
    for number in range(1, 20):
        store(worker, memory, number)
        assert load(worker, 0) == [True]


def test_a_smaller_bound_at_the_next_start(make_tier: MakeTier, memory: LayeredMemory, tmp_path: Path) -> None:
    _, worker = make_tier()
    store(worker, memory, *range(10))
    for number, path in enumerate(sorted(files(tmp_path), key=lambda path: path.name)):
        os.utime(path, ns=(number, number))
    tier, worker = make_tier(size_bytes=3 * 4096)
    assert tier.used_bytes == 3 * 4096
    assert [path.name[:8] for path in files(tmp_path)] == [f"{number:08x}" for number in (7, 8, 9)]


def test_two_engines_on_one_folder(make_tier: MakeTier, tmp_path: Path) -> None:
    """Both write and read the same few keys while either evicts; whatever arrives is right."""
    bound = 6 * 4096
    wrong: list[str] = []
    arrived = [0, 0]

    def work(engine: int) -> None:
        rng = random.Random(engine)
        own = LayeredMemory(8)
        tier = DiskTier(str(tmp_path / "tier"), FINGERPRINT, BLOCK_BYTES, size_bytes=bound)
        worker = tier.make_worker(own)
        for step in range(150):
            number = rng.randrange(12)
            if rng.random() < 0.5:
                own.fill(0, 1, number)
                worker.begin(KVTransferPlan(stores=[job(step, (key(number), 1))]))
                if wait_for(worker, step) != [True]:
                    wrong.append(f"engine {engine} could not store {number}")
            else:
                worker.begin(KVTransferPlan(loads=[job(step, (key(number), 2))]))
                if wait_for(worker, step) == [True]:
                    arrived[engine] += 1
                    if own.read(0, 2) != content(number):
                        wrong.append(f"engine {engine} read rubbish for {number}")
        worker.close()

    threads = [threading.Thread(target=work, args=(engine,)) for engine in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert min(arrived) > 5, "otherwise this test says nothing"
    assert not list(tmp_path.rglob("*.tmp"))
    assert len(files(tmp_path)) <= 6 + 2, "the bound, and what each has not seen of the other yet"


def test_a_process_that_is_killed_while_it_writes_leaves_whole_blocks_only(
    tmp_path: Path, memory: LayeredMemory
) -> None:
    code = f"""
from quire_interfaces import BlockKey
from quire_kv_transfer import TierFolder, write_block
from quire_testkit.conformance.kv_transfer import LayeredMemory
folder = TierFolder({str(tmp_path / "tier")!r}, bytes.fromhex({FINGERPRINT.hex()!r}))
for number in range(10**9):
    payload = b"".join(LayeredMemory(1).fill(0, 0, number % 250))
    key = BlockKey(0, number.to_bytes(4, "big") * 8)
    write_block(folder.path(key), folder.fingerprint, key, payload)
    print(number, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 100:
            pass
        process.kill()
    written = files(tmp_path)
    assert len(written) > 100
    worker = DiskTier(str(tmp_path / "tier"), FINGERPRINT, BLOCK_BYTES, size_bytes=100 << 20).make_worker(memory)
    for number in range(len(written)):
        worker.begin(KVTransferPlan(loads=[job(number, (key(number), 2))]))
        assert wait_for(worker, number) == [True]
        assert memory.read(0, 2) == content(number % 250)
    worker.close()


def test_what_another_engine_used_is_spared(tmp_path: Path) -> None:
    usage = FolderUsage(str(tmp_path), 2 * 4096)
    paths = []
    for number in range(2):
        path = Path(TierFolder(str(tmp_path), FINGERPRINT).path(key(number)))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 100)
        paths.append(path)
        usage.added(str(path), 100)
    later_ns = time.time_ns() + 10**9
    os.utime(paths[0], ns=(later_ns, later_ns))
    usage.make_room(100)
    assert [path.exists() for path in paths] == [True, False]
    assert usage.total_bytes == 4096


def test_files_that_are_not_ours_are_neither_counted_nor_removed(make_tier: MakeTier, tmp_path: Path) -> None:
    tier, _ = make_tier()
    shelf = Path(TierFolder(tier.root, FINGERPRINT).path(key(1))).parent
    shelf.mkdir(parents=True)
    kept = [shelf / "notes.txt", shelf / "photo.kv", Path(tier.root) / "a.kv"]
    for path in kept:
        path.write_bytes(b"x" * 20000)
    abandoned, fresh = shelf / ".a.kv.1-0.tmp", shelf / ".b.kv.1-1.tmp"
    for path in (abandoned, fresh):
        path.write_bytes(b"x")
    os.utime(abandoned, (0, 0))
    tier, _ = make_tier(size_bytes=4096)
    assert tier.used_bytes == 0
    assert all(path.exists() for path in (*kept, fresh))
    assert not abandoned.exists()


def test_where_no_file_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "folder", Path("/proc/quire")):
        with pytest.raises(ConfigError, match="no files can be written") as caught:
            DiskTier(str(path), FINGERPRINT, BLOCK_BYTES)
        assert caught.value.field == "kv_disk_path"


def test_sizes_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one block of this model takes 4096"):
        DiskTier(str(tmp_path), FINGERPRINT, BLOCK_BYTES, size_bytes=4095)
    with pytest.raises(ConfigError, match="has room for") as caught:
        DiskTier(str(tmp_path), FINGERPRINT, BLOCK_BYTES, size_bytes=1 << 60)
    assert caught.value.field == "kv_disk_size"


def test_the_default_size_is_half_of_what_is_free(tmp_path: Path) -> None:
    stat = os.statvfs(tmp_path)
    tier = DiskTier(str(tmp_path), FINGERPRINT, BLOCK_BYTES)
    assert tier.size_bytes == pytest.approx(stat.f_bavail * stat.f_frsize / 2, rel=0.2)


def test_offers_beyond_the_bound_are_forgotten_oldest_first(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path), FINGERPRINT, BLOCK_BYTES, size_bytes=1 << 20, max_wanted=3)
    tier.connector.offer(0, [key(number).block_hash for number in range(5)])
    assert tier.connector.take_stores(100) == [key(2), key(3), key(4)]


def test_copies_that_wait_for_the_disk_are_bounded(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path), FINGERPRINT, [80 << 20], size_bytes=800 << 20)
    connector = tier.connector
    connector.offer(0, [key(number).block_hash for number in range(5)])
    first = connector.take_stores(100)
    assert first == [key(0), key(1), key(2)], "at most 256 MiB"
    assert connector.take_stores(100) == []
    assert connector.has_stores
    connector.stored(first[:1], [True])
    assert connector.take_stores(100) == [key(3)]


def test_copies_that_wait_to_be_written_are_bounded(tmp_path: Path) -> None:
    connector = TierConnector(
        TierStack([HostMemoryTier(0)], FINGERPRINT, (40,)), (40,), max_store_bytes=120, max_wanted=99
    )
    connector.offer(0, [key(number).block_hash for number in range(7)])
    first = connector.take_stores(99)
    assert first == [key(number) for number in range(3)], "as many as fit, to the last byte"
    assert connector.take_stores(99) == []
    connector.stored(first[:2], [True, False])
    assert connector.take_stores(1) == [key(3)]
    assert connector.take_stores(99) == [key(4)]
