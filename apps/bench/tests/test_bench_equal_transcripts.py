"""The real Whisper tiny.en beside Transformers' long-form generation with the same weights, by the script that compares
whole folders of recordings."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from quire_testkit.real_checkpoints import WHISPER_TINY_EN, real_checkpoint

ROOT = Path(__file__).resolve().parents[3]
SOUND = ROOT / "packages" / "llm" / "tests" / "sounds" / "river.ogg"


def test_text_and_times_are_those_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = importlib.util.spec_from_file_location(
        "equal_transcripts", ROOT / "apps" / "bench" / "benchmarks" / "equal_transcripts.py"
    )
    assert script is not None
    assert script.loader is not None
    programs = importlib.util.module_from_spec(script)
    script.loader.exec_module(programs)
    folder, found = str(real_checkpoint(WHISPER_TINY_EN)), tmp_path / "peer.json"
    samples, rate = soundfile.read(SOUND, dtype="float32")
    soundfile.write(tmp_path / "short.flac", samples, rate)
    pause = np.zeros(15 * rate, np.float32)
    soundfile.write(
        tmp_path / "windows.flac", np.concatenate([samples, pause, 0.5 * samples, samples[5 * rate :]]), rate
    )
    programs.by_transformers(folder, tmp_path, found)
    texts = json.loads(found.read_text())["texts"]
    assert [len(texts[name]["segments"]) >= 2 for name in ("short.flac", "windows.flac")] == [True, True]
    programs.by_quire(folder, tmp_path, found)
    assert capsys.readouterr().out.splitlines()[-1] == "2 of 2 equal"
