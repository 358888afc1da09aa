"""What transcribes a recording with a served model: the one seam between models that hear and whoever has a recording.

A transcriber gets sound block by block and gives segments as they are heard. Knows no route and no file.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from quire_interfaces import RequestOptions
from quire_speech import Segment, TokenLogprob, Transcription, TranscriptionOptions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    AudioBlocks = AsyncIterator[NDArray[np.float32]]

__all__ = ["Hearing", "TextDelta", "Transcriber", "segments_of", "text_of_segments", "transcription_of"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text of a segment that is still to come."""

    text: str
    logprobs: tuple[TokenLogprob, ...] | None
    """Of its tokens; None where they were not asked for."""


@dataclass(slots=True)
class Hearing:
    """What is known of a recording while it is heard; the transcriber fills it in."""

    language: str = ""
    """Code or name of the spoken language; empty while it is not known, or where the model does not say."""
    language_probability: float = 0.0
    num_prompt_tokens: int = 0
    """Tokens of all prompts so far, those of the sound included."""
    num_generation_tokens: int = 0
    wants_deltas: bool = False
    """Set by whoever wants text before its segment is there, where the transcriber can tell it (`TextDelta`)."""


class Transcriber(Protocol):
    """Transcribes recordings."""

    can_translate: bool
    has_word_timestamps: bool

    def transcribe(
        self, blocks: AudioBlocks, options: TranscriptionOptions, request_options: RequestOptions, hearing: Hearing
    ) -> AsyncGenerator[Segment | TextDelta, None]:
        """The segments of a recording, in order, as soon as each is certain. Closing it ends its requests. Where
        `hearing.wants_deltas`, a segment may be told of by parts of its text before; where a window had to be heard
        again, the segment may say something else, and counts.

        Args:
            blocks: Float32 [samples] at 16 kHz, one channel; read no faster than they are heard.
            options: How.
            request_options: What else the engine is told of each request.
            hearing: Filled in as things become known.

        Raises:
            RequestError: an option that this model does not know.
        """
        ...


async def segments_of(
    stream: AsyncGenerator[Segment | TextDelta, None],
) -> AsyncGenerator[Segment, None]:
    """The segments alone. Closing it closes the stream."""
    async with contextlib.aclosing(stream):
        async for each in stream:
            if isinstance(each, Segment):
                yield each


def text_of_segments(segments: list[Segment]) -> str:
    """The whole text."""
    return "".join(each.text for each in segments).strip()


def transcription_of(segments: list[Segment], hearing: Hearing, duration_s: float) -> Transcription:
    """All of a recording, once it has been heard."""
    fields: dict[str, Any] = {"language": hearing.language, "language_probability": hearing.language_probability}
    return Transcription(text=text_of_segments(segments), duration_s=duration_s, segments=tuple(segments), **fields)
