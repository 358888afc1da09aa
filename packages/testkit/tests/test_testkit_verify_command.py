"""`quire verify` says at once what it cannot compare."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from quire_interfaces import CheckpointError
from quire_testkit.parity.cli import main


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("LlamaForCausalML", "did you mean LlamaForCausalLM"),
        ("no/such/folder", "neither the folder of a checkpoint nor an architecture"),
        (".", "has no config.json"),
    ],
)
def test_what_is_no_model_is_told_before_anything_runs(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        main(["verify", "LlamaForCausalLM", name])
    assert capsys.readouterr().out == ""


def test_without_transformers_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CheckpointError, match=r"compares Quire with Transformers, which is not installed: pip install"):
        main(["verify", "LlamaForCausalLM"])
