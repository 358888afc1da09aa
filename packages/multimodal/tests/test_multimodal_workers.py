"""Preparing processes: what dies is replaced, what takes too long is ended, what they say is told apart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from multimodal_samples import encoded, random_image

from quire_interfaces import EngineDeadError
from quire_multimodal import MediaConfig, MediaError
from quire_multimodal.workers import WorkerPool

_threads = ThreadPoolExecutor(32)


@pytest.fixture(scope="module")
def folder(processor_folder: Callable[[str], Path]) -> Path:
    return processor_folder("llava")


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[WorkerPool]:
    pool = WorkerPool(folder, MediaConfig(media_processes=2, media_niceness=3))
    yield pool
    pool.close()


def submit(pool: WorkerPool, path: Path, seed: int = 0, size: int = 30) -> Future[dict[str, Any]]:
    message = {"modality": "image", "form": "encoded", "arguments": {}, "path": str(path / str(seed))}
    return _threads.submit(pool.prepare, message, encoded(random_image(size, size, seed)))


def test_items_are_prepared_by_several_processes(pool: WorkerPool, tmp_path: Path) -> None:
    futures = [submit(pool, tmp_path, seed) for seed in range(20)]
    assert all(each.result()["num_embeds"] == 4 for each in futures)
    assert len(pool.process_ids()) == 2
    assert all(os.getpriority(os.PRIO_PROCESS, pid) == os.nice(0) + 3 for pid in pool.process_ids())
    assert not pool.uses_torch
    for pid in pool.process_ids():
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
    assert len(list(tmp_path.iterdir())) == 20


def test_a_process_that_dies_while_it_prepares_takes_nothing_with_it(pool: WorkerPool, tmp_path: Path) -> None:
    pids = pool.process_ids()
    futures = [submit(pool, tmp_path, seed, size=600) for seed in range(6)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert all(each.result()["num_embeds"] == 4 for each in futures)
    assert not set(pids) & set(pool.process_ids())


def test_signals_of_a_terminal_or_service_are_the_owners_business(pool: WorkerPool, tmp_path: Path) -> None:
    pids = pool.process_ids()
    for pid in pids:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    futures = [submit(pool, tmp_path, seed, size=600) for seed in range(6)]
    assert all(each.result()["num_embeds"] == 4 for each in futures)
    assert set(pids) <= set(pool.process_ids()), "others start where there is work for them"


def test_an_item_that_kills_twice_fails_alone(pool: WorkerPool, tmp_path: Path) -> None:
    stopped = threading.Event()

    def kill() -> None:
        while not stopped.wait(0.02):
            for pid in pool.process_ids():
                os.kill(pid, signal.SIGKILL)

    for pid in pool.process_ids():
        os.kill(pid, signal.SIGSTOP)  # none is done before it dies
    future = submit(pool, tmp_path, 1)
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(MediaError, match="died, twice") as failure:
            future.result()
    finally:
        stopped.set()
        killer.join()
    assert failure.value.code == "media_processing_failed"
    assert submit(pool, tmp_path, 2).result()["num_embeds"] == 4


def test_bad_items_are_answers(pool: WorkerPool, tmp_path: Path) -> None:
    message = {"modality": "image", "form": "encoded", "arguments": {}, "path": str(tmp_path / "x")}
    before = pool.process_ids()
    with pytest.raises(MediaError, match="no image"):
        pool.prepare(message, b"nothing")
    with pytest.raises(MediaError, match="takes no audio") as failure:
        pool.prepare({**message, "modality": "audio"}, b"")
    assert failure.value.code == "unsupported_media"
    assert set(before) <= set(pool.process_ids())
    assert list(tmp_path.iterdir()) == []


def test_deadlines_and_closing(folder: Path, tmp_path: Path) -> None:
    pool = WorkerPool(folder, MediaConfig(media_timeout_s=0.5))
    (pid,) = pool.process_ids()
    os.kill(pid, signal.SIGSTOP)  # as an item that takes for ever
    with pytest.raises(MediaError, match=r"took more than 0\.5 s"):
        submit(pool, tmp_path).result()
    assert pool.process_ids() == []
    waiting = [submit(pool, tmp_path, seed) for seed in range(3)]
    pool.close()
    failures = [each.exception(timeout=60) for each in waiting]
    assert all(failure is None or isinstance(failure, (EngineDeadError, MediaError)) for failure in failures)
    assert isinstance(submit(pool, tmp_path).exception(), EngineDeadError)


def test_processes_end_with_their_owner(folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom quire_multimodal import MediaConfig\nfrom quire_multimodal.workers import WorkerPool\n"
        "print(*WorkerPool(sys.argv[1], MediaConfig()).process_ids(), flush=True)\ntime.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 60
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
