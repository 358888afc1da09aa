"""What the routes of speech answer with: JSON, text, subtitles, or events. Knows no engine."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.responses import Response

from quire.transcribers import Hearing, text_of_segments, transcription_of
from quire_server.responses import json_response, sse
from quire_server.speech.request import SpeechRequest
from quire_speech import Segment
from quire_speech.subtitles import srt_cue, vtt_cue
from quire_speech.transcript_forms import segment_object, verbose_transcript, word_object, written

__all__ = ["events", "whole_answer"]

_MEDIA_TYPES = {"text": "text/plain", "srt": "text/plain", "vtt": "text/vtt"}


def whole_answer(
    body: SpeechRequest, task: str, segments: list[Segment], hearing: Hearing, duration_s: float
) -> Response:
    """The answer to a request that wants no stream."""
    transcription = transcription_of(segments, hearing, duration_s)
    form = body.response_format
    assert form != "diarized_json"
    if form in _MEDIA_TYPES:
        return Response(written(transcription, form), media_type=_MEDIA_TYPES[form])
    usage = {"type": "duration", "seconds": math.ceil(duration_s)}
    if form == "verbose_json":
        verbose = verbose_transcript(transcription, task=task, granularities=body.granularities)
        return json_response({**verbose, "usage": usage})
    return json_response({"text": transcription.text, "usage": usage})


async def events(
    segments: AsyncIterator[Segment],
    body: SpeechRequest,
    task: str,
    name: str,
    model: str,
    hearing: Hearing,
    duration_s: float,
) -> AsyncGenerator[bytes, None]:
    """OpenAI's events, each of which is vLLM's chunk at the same time: whoever reads `type` finds the one, whoever
    reads `choices` the other.

    Args:
        segments: As they are heard.
        body: Of the request.
        task: "transcribe" or "translate".
        name: Id of the answer.
        model: Its name.
        hearing: Counts tokens.
        duration_s: Length of the recording, told with `verbose_json`.
    """
    noun = "transcription" if task == "transcribe" else "translation"
    common = {"id": name, "object": f"{noun}.chunk", "created": int(time.time()), "model": model}
    if body.response_format == "verbose_json":
        common["duration"] = duration_s
    heard: list[Segment] = []
    num_cues = 0
    if body.response_format == "vtt":
        yield sse(_delta(common, "WEBVTT\n\n", None))
    async for segment in segments:
        heard.append(segment)
        if not segment.text:
            continue
        num_cues += 1
        if body.response_format == "srt":
            text = srt_cue(num_cues, segment)
        elif body.response_format == "vtt":
            text = vtt_cue(segment)
        else:
            text = segment.text.lstrip() if num_cues == 1 else segment.text
        event = _delta(common, text, segment if body.response_format == "verbose_json" else None)
        if body.stream_continuous_usage_stats:
            event["usage"] = _usage(hearing)
        yield sse(event)
    done = {"type": "transcript.text.done", "text": text_of_segments(heard), "language": hearing.language, **common}
    if body.response_format == "verbose_json":
        done["language_probability"] = hearing.language_probability
    done["choices"] = [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop", "stop_reason": None}]
    yield sse({**done, "usage": _usage(hearing)})


def _delta(common: dict[str, Any], text: str, segment: Segment | None) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None, "stop_reason": None}
    event: dict[str, Any] = {"type": "transcript.text.delta", "delta": text, **common, "choices": [choice]}
    if segment is not None:
        event["segment"] = segment_object(segment)
        if segment.words is not None:
            event["segment"]["words"] = [word_object(each) for each in segment.words]
    return event


def _usage(hearing: Hearing) -> dict[str, Any]:
    """OpenAI's counts and vLLM's."""
    prompt, generated = hearing.num_prompt_tokens, hearing.num_generation_tokens
    return {
        "type": "tokens",
        "input_tokens": prompt,
        "output_tokens": generated,
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }
