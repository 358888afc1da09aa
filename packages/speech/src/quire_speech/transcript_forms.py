"""A transcription as it is written down: json, text, srt, vtt and verbose_json of OpenAI's API. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, Literal

from quire_speech.results import Segment, Transcription, Word
from quire_speech.subtitles import srt, vtt

__all__ = [
    "FORMS",
    "TranscriptForm",
    "json_transcript",
    "segment_object",
    "verbose_transcript",
    "word_object",
    "written",
]

TranscriptForm = Literal["json", "text", "srt", "vtt", "verbose_json"]
FORMS: tuple[TranscriptForm, ...] = ("json", "text", "srt", "vtt", "verbose_json")
"""Names of the forms, as `response_format` has them."""


def json_transcript(transcription: Transcription) -> dict[str, Any]:
    """The text alone."""
    return {"text": transcription.text}


def verbose_transcript(
    transcription: Transcription, *, task: str = "transcribe", granularities: Collection[str] = ("segment",)
) -> dict[str, Any]:
    """Text, language, length, and the parts that are asked for.

    Args:
        transcription: What was heard.
        task: "transcribe" or "translate".
        granularities: "segment" and "word": which lists there are.
    """
    fields: dict[str, Any] = {
        "task": task,
        "language": transcription.language,
        "language_probability": transcription.language_probability,
        "duration": transcription.duration_s,
        "text": transcription.text,
    }
    if "word" in granularities:
        fields["words"] = [word_object(word) for each in transcription.segments for word in each.words or ()]
    if "segment" in granularities:
        fields["segments"] = [segment_object(each) for each in transcription.segments]
    return fields


def segment_object(segment: Segment) -> dict[str, Any]:
    """A segment in OpenAI's shape; `seek` counts hundredths of a second, as Whisper's frames do."""
    return {
        "id": segment.index,
        "seek": round(segment.seek_s * 100),
        "start": segment.start_s,
        "end": segment.end_s,
        "text": segment.text,
        "tokens": list(segment.token_ids),
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }


def word_object(word: Word) -> dict[str, Any]:
    """A word in OpenAI's shape, with its probability."""
    return {"word": word.text.strip(), "start": word.start_s, "end": word.end_s, "probability": word.probability}


def written(
    transcription: Transcription,
    form: TranscriptForm,
    *,
    task: str = "transcribe",
    granularities: Collection[str] = ("segment",),
) -> str:
    """The transcription as the text of a file of this form."""
    if form == "srt":
        return srt(transcription.segments)
    if form == "vtt":
        return vtt(transcription.segments)
    if form == "text":
        return transcription.text + "\n"
    verbose = verbose_transcript(transcription, task=task, granularities=granularities)
    fields = json_transcript(transcription) if form == "json" else verbose
    return json.dumps(fields, ensure_ascii=False) + "\n"
