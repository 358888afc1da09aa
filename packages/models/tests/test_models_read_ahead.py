"""Files of a checkpoint are read ahead by several threads, in order, and no further than the bound."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from quire_interfaces import ConfigError
from quire_models import DecoderLM, ModelConfig, load_model, read_ahead, weights
from quire_models.read_ahead import ReadAhead
from quire_testkit.hf_checkpoints import tiny_hf_checkpoint

PIECE = 4096


class Reads:
    """What was read, from `os.preadv` on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offsets: list[int] = []
        self.num_at_once = self.most_at_once = 0
        self.awaited = 0
        """Reads go on once so many are there at the same time."""
        self._lock = threading.Lock()
        self._read = read_ahead.os.preadv
        monkeypatch.setattr(read_ahead.os, "preadv", self)
        monkeypatch.setattr(read_ahead, "PIECE_BYTES", PIECE)

    def __call__(self, descriptor: int, buffers: list[bytearray], offset: int) -> int:
        with self._lock:
            self.num_at_once += 1
            self.most_at_once = max(self.most_at_once, self.num_at_once)
            self.offsets.append(offset)
        for _ in range(1000):
            if self.most_at_once >= self.awaited:
                break
            time.sleep(0.005)
        time.sleep(0.002)
        with self._lock:
            self.num_at_once -= 1
        return self._read(descriptor, buffers, offset)


def wait_for(reads: Reads, count: int) -> None:
    for _ in range(1000):
        if len(reads.offsets) >= count and not reads.num_at_once:
            return
        time.sleep(0.005)
    raise AssertionError(f"{len(reads.offsets)} of {count} pieces were read")


def test_it_stays_within_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    reads.awaited = 3
    (tmp_path / "a").write_bytes(bytes(10 * PIECE))
    (tmp_path / "b").write_bytes(bytes(10 * PIECE))
    with ReadAhead([tmp_path / "a", tmp_path / "b"], num_threads=3, ahead_bytes=5 * PIECE) as ahead:
        wait_for(reads, 5)
        time.sleep(0.05)
        assert sorted(reads.offsets) == [i * PIECE for i in range(5)]
        assert reads.most_at_once == 3
        ahead.used(12 * PIECE)  # what was used before it was read is left out
        wait_for(reads, 10)
        time.sleep(0.05)
        assert sorted(reads.offsets[5:]) == [i * PIECE for i in range(2, 7)]  # of the second file
    assert not any(thread.name.startswith("read-ahead") for thread in threading.enumerate())


def test_the_bound_counts_the_bytes_of_small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of less than a piece count what they hold."""
    reads = Reads(monkeypatch)
    files = [tmp_path / f"{index:02}" for index in range(16)]
    for file in files:
        file.write_bytes(bytes(PIECE // 4))
    with ReadAhead(files, num_threads=2, ahead_bytes=2 * PIECE) as ahead:
        wait_for(reads, 8)
        time.sleep(0.05)
        assert len(reads.offsets) == 8
        ahead.used(4 * PIECE)  # all of it
    assert len(reads.offsets) == 8


def test_an_error_ends_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SMALL_BYTES", 0)
    tiny_hf_checkpoint(tmp_path, "llama", max_shard_size="20KB")

    def fail(*_: object) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError) as raised:
        load_model(ModelConfig.from_path(tmp_path), tmp_path, dtype="bfloat16", progress=fail)
    assert raised.tb is not None, "the error, which holds on to the frames, is still there"
    assert not any(thread.name.startswith("read-ahead") for thread in threading.enumerate())


def test_files_that_cannot_be_read_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(bytes(2 * PIECE))
    ahead = ReadAhead([tmp_path / "a", tmp_path / "b"])
    (tmp_path / "a").unlink()
    with ahead:
        wait_for(reads, 2)


class Recorded(ReadAhead):
    """Remembers what it was given."""

    files: tuple[Path, ...] = ()

    def __init__(self, files: Sequence[Path]) -> None:
        Recorded.files = tuple(files)
        super().__init__(files)


@pytest.mark.parametrize("load_format", ["auto", "runai_streamer"])
def test_sharded_checkpoints_load_the_same(load_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several files, read ahead, or streamed by the library."""
    monkeypatch.setattr(weights, "SMALL_BYTES", 0)
    monkeypatch.setattr(read_ahead, "ReadAhead", Recorded)
    monkeypatch.setattr(Recorded, "files", ())
    model = tiny_hf_checkpoint(tmp_path, "llama", max_shard_size="20KB")
    num_files = len(list(tmp_path.glob("*.safetensors")))
    assert num_files > 2
    told: list[tuple[int, int]] = []
    config = ModelConfig.from_path(tmp_path)
    loaded = load_model(
        config, tmp_path, dtype="bfloat16", load_format=load_format, progress=lambda *both: told.append(both)
    )
    assert isinstance(loaded, DecoderLM)
    assert torch.equal(loaded.embedding.part(None), model.state_dict()["model.embed_tokens.weight"].bfloat16())
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1]
    assert len(Recorded.files) == (num_files if load_format == "auto" else 0)


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_hf_checkpoint(tmp_path, "llama")
    monkeypatch.setitem(sys.modules, "runai_model_streamer", None)
    with pytest.raises(ConfigError, match=r"pip install 'quire-models\[runai\]'"):
        load_model(ModelConfig.from_path(tmp_path), tmp_path, load_format="runai_streamer")
