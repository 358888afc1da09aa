"""Speech to text around a model: spectrograms, windows of long recordings, times of segments and words.

Importing this package loads no numpy: modules that need it (`features`) are imported by their own names.
"""

from __future__ import annotations

from quire_speech.options import TranscriptionOptions
from quire_speech.results import Segment, Transcription, Word

__version__ = "0.1.0"

__all__ = ["Segment", "Transcription", "TranscriptionOptions", "Word"]
