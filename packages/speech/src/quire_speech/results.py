"""What is transcribed, as data. Times are seconds from the beginning of the recording."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Segment", "TokenLogprob", "Transcription", "Word"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of a text, and how probable it was."""

    token: str
    """Its text; what is no whole character as U+FFFD."""
    logprob: float
    token_bytes: bytes
    """What it adds to the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A word with its times."""

    start_s: float
    end_s: float
    text: str
    """With the space or punctuation that stands before or behind it."""
    probability: float
    """Mean probability of its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a recording with its text."""

    index: int
    """Number of the segment in its recording, from 0."""
    seek_s: float
    """Where the window begins that the segment was heard in."""
    start_s: float
    end_s: float
    text: str
    token_ids: tuple[int, ...]
    """The tokens of the text, and those of its times."""
    temperature: float
    """Temperature at which the window was decoded at last."""
    avg_logprob: float
    """Mean log probability of the window's tokens, end of text included."""
    compression_ratio: float
    """Bytes of the window's text divided by those after zlib: high where a text repeats itself."""
    no_speech_prob: float
    """Probability that there is no speech in the window."""
    words: tuple[Word, ...] | None = None
    """None where they were not asked for."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Of the tokens of the text; None where they were not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcription:
    """A recording with its text."""

    text: str
    """Texts of all segments, without spaces around."""
    language: str
    """Language that was spoken, as a code (`en`)."""
    language_probability: float
    """1 where the language was given, or the model knows only one."""
    duration_s: float
    """Length of the recording."""
    segments: tuple[Segment, ...]
