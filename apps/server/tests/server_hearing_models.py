"""What tests of served models that hear have in common: a recording, what is heard of it, and what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import transformers
from numpy.typing import NDArray

from quire_speech.voice_activity import SpeechWindows
from quire_testkit.media_files import RATE, tone

__all__ = ["NUM_TOKENS", "RECORDING", "heard_window", "transcript"]

NUM_TOKENS = 6
"""That are written of a recording."""


def _recording() -> NDArray[np.float32]:
    silence = np.zeros(RATE, np.float32)
    sound = np.concatenate([silence, tone(3, 1.2), silence])
    return np.asarray(np.round(sound * 32767) / 32768, np.float32)


RECORDING = _recording()
"""A tone between silences, rounded as in a file."""


def heard_window() -> tuple[float, NDArray[np.float32]]:
    """Where what is heard of the recording begins, in seconds, and its samples."""
    cutter = SpeechWindows(30.0)
    (window,) = [*cutter.feed(RECORDING), *cutter.finish()]
    return window


def transcript(folder: Path, token_ids: Any) -> str:
    """The text of tokens, by the tokenizer of a checkpoint."""
    text = transformers.AutoTokenizer.from_pretrained(folder).decode(token_ids, skip_special_tokens=True).strip()
    assert text
    return text
