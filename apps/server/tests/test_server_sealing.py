"""Thoughts that clients keep: nobody reads or changes them on the way, and a restarted server reads them."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from quire_server.sealing import Sealer, Summary, make_sealer, open_summary, pack_summary


@pytest.mark.parametrize("text", ["", "a", "é\U0001f600" * 5000, "half \ud83d"])
def test_what_was_sealed_can_be_opened_with_the_same_key_only(text: str) -> None:
    sealed = Sealer(b"key").seal(text)
    assert Sealer(b"key").open(sealed) == text.encode("utf-8", "replace").decode()
    assert Sealer(b"another").open(sealed) is None
    assert Sealer(b"key").seal(text) != sealed, "equal thoughts look alike"


def test_damaged_contents_are_nothing() -> None:
    sealer = Sealer(b"key")
    raw = bytearray(base64.b64decode(sealer.seal("a thought")))
    for place in range(len(raw)):
        raw[place] ^= 1
        assert sealer.open(base64.b64encode(raw).decode()) is None, place
        raw[place] ^= 1
    for value in (None, 5, "", "§", "AAAA", base64.b64encode(raw[:-1]).decode(), base64.b64encode(raw[:20]).decode()):
        assert sealer.open(value) is None, value


def test_the_key_is_kept_beside_the_responses(tmp_path: Path) -> None:
    path = tmp_path / "new" / "responses.sqlite"
    sealed = make_sealer(path, "").seal("x")
    assert make_sealer(path, "").open(sealed) == "x"
    (key,) = path.parent.iterdir()
    assert key.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("has_file", [True, False])
def test_each_owner_opens_its_own_alone(tmp_path: Path, has_file: bool) -> None:
    path = tmp_path / "responses.sqlite" if has_file else None
    for summary in (Summary("é", True), Summary("", False)):
        sealed, packed = make_sealer(path, "ann").seal("x"), pack_summary(summary, make_sealer(path, "ann"))
        assert make_sealer(path, "ann").open(sealed) == "x"
        assert open_summary(packed, make_sealer(path, "ann")) == summary
        for stranger in ("ben", ""):
            assert make_sealer(path, stranger).open(sealed) is None
            assert open_summary(packed, make_sealer(path, stranger)) is None
        assert open_summary(packed) is None
        assert make_sealer(path, "ann").open(packed) is None, "a summary is no thought"


def test_without_a_file_nobody_reads_it_after_the_process(tmp_path: Path) -> None:
    not_a_folder = tmp_path / "file"
    not_a_folder.write_text("")
    for path in (None, not_a_folder / "responses"):
        assert make_sealer(path, "").open(make_sealer(path, "").seal("x")) is None


def test_summaries_of_others_are_damaged_by_any_change() -> None:
    packed = bytearray(base64.b64decode(pack_summary(Summary("a summary", True), Sealer(b"key"))))
    for place in range(len(packed)):
        packed[place] ^= 1
        assert open_summary(base64.b64encode(packed).decode(), Sealer(b"key")) is None, place
        packed[place] ^= 1


def test_summaries_of_nobody_outlive_keys() -> None:
    for summary in (Summary("é", True), Summary("", False)):
        assert open_summary(pack_summary(summary)) == summary
    assert open_summary(Sealer(b"key").seal("x")) is None
