"""Speech to text around a model: spectrograms, windows of long recordings, times of segments and words.

Importing this package loads no numpy: names that need it are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire_speech.options import TranscriptionOptions
from quire_speech.results import Segment, Transcription, Word

if TYPE_CHECKING:
    from quire_speech.features import SAMPLES_PER_S, log_mel, window_log_mel

__version__ = "0.1.0"

__all__ = [
    "SAMPLES_PER_S",
    "Segment",
    "Transcription",
    "TranscriptionOptions",
    "Word",
    "log_mel",
    "window_log_mel",
]

_LAZY = {"SAMPLES_PER_S": "features", "log_mel": "features", "window_log_mel": "features"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
