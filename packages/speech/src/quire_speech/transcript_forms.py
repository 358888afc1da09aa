"""A transcription as it is written down: json, text, srt, vtt and verbose_json of OpenAI's API. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, Literal

from quire_speech.results import Segment, Transcription, Word
from quire_speech.subtitles import srt, vtt, vtt_cue, vtt_words

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


def json_transcript(transcription: Transcription, granularities: Collection[str] = ("segment",)) -> dict[str, Any]:
    """The text, and the words where they are asked for."""
    fields: dict[str, Any] = {"text": transcription.text}
    return fields | ({"words": _words(transcription)} if "word" in granularities else {})


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
        fields["words"] = _words(transcription)
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


def _words(transcription: Transcription) -> list[dict[str, Any]]:
    return [word_object(word) for each in transcription.segments for word in each.words or ()]


def written(
    transcription: Transcription,
    form: TranscriptForm,
    *,
    task: str = "transcribe",
    granularities: Collection[str] = ("segment",),
) -> str:
    """The transcription as the text of a file of this form.

    With "word" among the granularities a subtitle of SubRip is a word, one of WebVTT has the times of its words, and
    both forms of JSON list them.
    """
    has_words = "word" in granularities
    if form == "srt":
        words = [word for each in transcription.segments for word in each.words or ()]
        return srt(words if has_words else transcription.segments)
    if form == "vtt":
        return vtt(transcription.segments, vtt_words if has_words else vtt_cue)
    if form == "text":
        return transcription.text + "\n"
    verbose = verbose_transcript(transcription, task=task, granularities=granularities)
    fields = json_transcript(transcription, granularities) if form == "json" else verbose
    return json.dumps(fields, ensure_ascii=False) + "\n"
