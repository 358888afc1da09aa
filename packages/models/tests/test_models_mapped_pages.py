"""Mapped files as they are read for the last time: their pages leave memory, their contents do not."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from models_paged_driver import PagedDriver
from torch import Tensor

from quire_models import ModelConfig, load_model, mapped_pages
from quire_models.layers.network import Network
from quire_models.mapped_pages import MappedPages, discard_pages
from quire_testkit.hf_checkpoints import tiny_hf_checkpoint

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere pages stay")

MEGABYTE = 1 << 20


def resident_bytes(file: Path) -> int:
    """Of a file's pages that are mapped now, as the system counts them."""
    total, is_this = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split()[0].endswith(":"):
            is_this = line.endswith(str(file))
        elif is_this and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.fixture
def numbers(tmp_path: Path) -> np.memmap:
    """A mapped file of 16 MB that may be written to in memory, in a folder whose name has a space."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    np.arange(4 * MEGABYTE, dtype=np.int32).tofile(folder / "numbers")
    return np.memmap(folder / "numbers", dtype=np.int32, mode="c")


def file_of(numbers: np.memmap) -> Path:
    return Path(str(numbers.filename))


def opened_by(pages: MappedPages, file: Path) -> np.memmap:
    """The file, mapped by the loader whose pages these are, and read."""
    numbers = np.memmap(file, dtype=np.int32, mode="c")
    assert numbers.sum(dtype=np.int64) == 4 * MEGABYTE * (4 * MEGABYTE - 1) // 2
    return numbers


def test_pages_are_given_back_and_read_again(numbers: np.memmap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_pages, "KEPT_BYTES", 2 * MEGABYTE)
    file = file_of(numbers)
    pages = MappedPages([file])
    mapped = opened_by(pages, file)
    assert resident_bytes(file) >= 16 * MEGABYTE
    pages.trim()
    assert resident_bytes(file) == 0
    assert (np.asarray(mapped) == np.arange(4 * MEGABYTE)).all()
    pages.trim()  # what is read again is counted anew
    assert resident_bytes(file) == 0


def test_few_pages_stay(numbers: np.memmap) -> None:
    file = file_of(numbers)
    pages = MappedPages([file])
    kept = opened_by(pages, file)
    pages.trim()  # 128 MB may be there
    assert resident_bytes(file) >= 16 * MEGABYTE
    del kept


def test_a_part_of_large_files_may_stay(numbers: np.memmap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_pages, "KEPT_BYTES", 0)
    monkeypatch.setattr(mapped_pages, "KEPT_SHARE", 1)
    file = file_of(numbers)
    (file.parent / "other").write_bytes(bytes(16 * MEGABYTE))
    pages = MappedPages([file, file.parent / "other"])
    kept = opened_by(pages, file)
    pages.trim()
    assert resident_bytes(file) >= 16 * MEGABYTE
    del kept


def test_what_was_written_is_not_lost(numbers: np.memmap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_pages, "KEPT_BYTES", 2 * MEGABYTE)
    file = file_of(numbers)
    pages = MappedPages([file])
    mapped = opened_by(pages, file)
    mapped[2_000_000] = -7  # as a merged adapter writes
    pages.trim()
    assert mapped[2_000_000] == -7


def test_what_others_have_mapped_stays(numbers: np.memmap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_pages, "KEPT_BYTES", 2 * MEGABYTE)
    file = file_of(numbers)
    assert numbers.any()  # mapped and read before the loader comes
    before = resident_bytes(file)
    pages = MappedPages([file])
    kept = opened_by(pages, file)
    pages.trim()
    assert resident_bytes(file) == before
    del kept


def test_other_files_stay(numbers: np.memmap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_pages, "KEPT_BYTES", 2 * MEGABYTE)
    (tmp_path / "other").write_bytes(b"")
    pages = MappedPages([tmp_path / "other"])
    kept = opened_by(pages, file_of(numbers))
    pages.trim()
    assert resident_bytes(file_of(numbers)) >= 16 * MEGABYTE
    del kept


def test_whole_pages_only_are_discarded() -> None:
    memory = np.zeros(10 * 4096, dtype=np.uint8)
    memory[:] = 1
    address = memory.ctypes.data
    inner = -(-address // 4096) * 4096 - address  # up to the first whole page
    assert discard_pages(address + inner + 1, 4096) == 0
    assert discard_pages(address + inner - 1 if inner else address, 4096 + (inner > 0)) == 4096
    assert memory.sum() == 9 * 4096
    assert not memory[inner : inner + 4096].any()


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_a_converted_model_is_not_held_beside_its_file(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And computes what it does when every page stays."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    tiny_hf_checkpoint(tmp_path, "llama", dtype="bfloat16", **sizes)
    file = tmp_path / "model.safetensors"
    config = ModelConfig.from_path(tmp_path)
    expected = logits_of(load_model(config, tmp_path, linear_method=method))
    monkeypatch.setattr(mapped_pages, "KEPT_BYTES", MEGABYTE)
    before = resident_bytes(file)
    model = load_model(config, tmp_path, linear_method=method)
    assert resident_bytes(file) - before < file.stat().st_size // 4  # the embedding is of the file as before
    assert torch.equal(logits_of(model), expected)


def logits_of(model: Network) -> Tensor:
    driver = PagedDriver(model, block_size=4, shuffle=True)
    sequence = driver.add([5, 9, 200, 31, 7])
    driver.run(sequence, 4)
    return torch.stack(sequence.logits)
