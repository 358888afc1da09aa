"""Comparing digests: other tokens and other logits are told, rounding is not."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "digests"


@pytest.fixture(scope="module")
def digests() -> Any:
    spec = importlib.util.spec_from_file_location("digests", FOLDER / "digests.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entry(exact: str = "a", value: float = 3.0, bits: str = "b") -> dict[str, Any]:
    return {"models": {"X": {"exact": exact, "bits": bits, "largest": 4.0, "values": [1.0, value]}}}


def test_rounding_is_no_difference(digests: Any) -> None:
    assert digests.compare(entry(), entry(value=3.0 + 4e-5, bits="c")) == []


def test_other_tokens_logits_and_missing_entries_are_told(digests: Any) -> None:
    assert "was" in digests.compare(entry(), entry(exact="other"))[0]
    assert "logits differ by 2.5e-04" in digests.compare(entry(), entry(value=3.001))[0]
    assert digests.compare(entry(), {"models": {}}) == ["models: X: missing"]
    assert digests.compare(entry(), {}) == ["models: not computed"]


def test_how_a_stream_is_cut_makes_no_difference(digests: Any) -> None:
    def stream(*texts: str) -> str:
        events = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in texts]
        return "".join(f"data: {json.dumps(event)}\n\n" for event in [*events, {"usage": {"total": 3}}])

    assert digests._stream(stream("ab", "c")) == digests._stream(stream("a", "b", "c"))
    assert digests._stream(stream("ab", "c")) != digests._stream(stream("ab", "d"))


def test_the_baseline_holds_every_architecture_feature_and_conversation(digests: Any) -> None:
    baseline = json.loads((FOLDER / "baseline.json").read_text())
    assert baseline.keys() == digests.SECTIONS.keys()
    assert not [name for section in baseline.values() for name, entry in section.items() if "error" in entry]
