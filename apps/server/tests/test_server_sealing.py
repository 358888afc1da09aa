"""Thoughts that clients keep: nobody reads or changes them on the way, and a restarted server reads them."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from quire_server.config import ServerConfig
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
    sealed = make_sealer(ServerConfig(), path).seal("x")
    assert make_sealer(ServerConfig(api_key=("other",)), path).open(sealed) == "x"
    (key,) = path.parent.iterdir()
    assert key.stat().st_mode & 0o077 == 0


def test_without_a_file_the_key_comes_from_the_api_keys(tmp_path: Path) -> None:
    config = ServerConfig(api_key=("secret",))
    assert make_sealer(config, None).open(make_sealer(config, None).seal("x")) == "x"
    assert make_sealer(ServerConfig(api_key=("more",)), None).open(make_sealer(config, None).seal("x")) is None
    assert make_sealer(ServerConfig(), None).open(make_sealer(ServerConfig(), None).seal("x")) is None
    not_a_folder = tmp_path / "file"
    not_a_folder.write_text("")
    assert make_sealer(config, not_a_folder / "responses").open(make_sealer(config, None).seal("x")) == "x"


def test_summaries_outlive_keys() -> None:
    for summary in (Summary("é", True), Summary("", False)):
        assert open_summary(pack_summary(summary)) == summary
    assert open_summary(Sealer(b"key").seal("x")) is None
