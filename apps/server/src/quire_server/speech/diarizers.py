"""Plug-ins that tell speakers apart, for `response_format` diarized_json: packages of their own.

A plug-in is a class in the entry-point group `quire.diarizers`; `--diarizer-plugin NAME` starts it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from quire_interfaces.plugins import named_plugin
from quire_speech import Segment, Transcription

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ENTRY_POINT_GROUP", "Diarizer", "diarized_transcript", "load_diarizer"]

ENTRY_POINT_GROUP = "quire.diarizers"


class Diarizer(Protocol):
    """What a plug-in does. It is made once, as `Class()`, and called in worker threads, several at a time."""

    def __call__(
        self, samples: NDArray[np.float32], segments: Sequence[Segment], known_names: Sequence[str]
    ) -> Sequence[str]:
        """Who speaks in each segment.

        Args:
            samples: [N] of the whole recording, one channel, 16,000 a second, from -1 to 1.
            segments: What was heard, with times in seconds.
            known_names: Speakers that the request names; may be empty.

        Returns:
            A speaker for each segment, in their order.
        """


def load_diarizer(name: str) -> Diarizer:
    """An installed plug-in, made.

    Raises:
        ConfigError: none of this name is installed, or it cannot be imported; field `diarizer_plugin`.
    """
    plugin = named_plugin(ENTRY_POINT_GROUP, name, field="diarizer_plugin")
    diarizer: Diarizer = plugin.load(type, field="diarizer_plugin")()
    return diarizer


def diarized_transcript(transcription: Transcription, speakers: Sequence[str]) -> dict[str, Any]:
    """OpenAI's diarized_json.

    Args:
        transcription: What was heard.
        speakers: One for each segment.

    Raises:
        ValueError: there are more or fewer speakers than segments.
    """
    parts = zip(transcription.segments, speakers, strict=True)
    return {
        "task": "transcribe",
        "duration": transcription.duration_s,
        "text": transcription.text,
        "segments": [
            {
                "type": "transcript.text.segment",
                "id": f"seg_{part.index}",
                "start": part.start_s,
                "end": part.end_s,
                "text": part.text,
                "speaker": str(speaker),
            }
            for part, speaker in parts
        ],
        "usage": {"type": "duration", "seconds": math.ceil(transcription.duration_s)},
    }
