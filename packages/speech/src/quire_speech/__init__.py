"""Speech to text around a model: spectrograms, windows of long recordings, times of segments and words.

Importing this package loads no numpy: names that need it are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire_speech.languages import LANGUAGES, language_code
from quire_speech.options import TranscriptionOptions
from quire_speech.partial_text import PartialText
from quire_speech.results import Segment, TokenLogprob, Transcription, Word

if TYPE_CHECKING:
    from quire_speech.features import SAMPLES_PER_S, log_mel, standardized_log_mel, window_log_mel, window_samples
    from quire_speech.recording import Recording
    from quire_speech.transcriber import AlignTokens, Decode, Decoded, MoreSound, Probe, Step, Transcriber
    from quire_speech.vocabulary import SpeechVocabulary
    from quire_speech.words import Alignment, align

__version__ = "0.1.0"

__all__ = [
    "LANGUAGES",
    "SAMPLES_PER_S",
    "AlignTokens",
    "Alignment",
    "Decode",
    "Decoded",
    "MoreSound",
    "PartialText",
    "Probe",
    "Recording",
    "Segment",
    "SpeechVocabulary",
    "Step",
    "TokenLogprob",
    "Transcriber",
    "Transcription",
    "TranscriptionOptions",
    "Word",
    "align",
    "language_code",
    "log_mel",
    "standardized_log_mel",
    "window_log_mel",
    "window_samples",
]

_LAZY = {
    "AlignTokens": "transcriber",
    "Alignment": "words",
    "Decode": "transcriber",
    "Decoded": "transcriber",
    "MoreSound": "transcriber",
    "Probe": "transcriber",
    "Recording": "recording",
    "SAMPLES_PER_S": "features",
    "SpeechVocabulary": "vocabulary",
    "Step": "transcriber",
    "Transcriber": "transcriber",
    "align": "words",
    "log_mel": "features",
    "standardized_log_mel": "features",
    "window_log_mel": "features",
    "window_samples": "features",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
