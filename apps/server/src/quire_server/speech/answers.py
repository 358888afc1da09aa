"""What the routes of speech answer with: JSON, text, subtitles, or events. Knows no engine."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from starlette.responses import Response

from quire.speech.transcribers import Hearing, TextDelta, text_of_segments, transcription_of
from quire_server.logprobs import LOWEST
from quire_server.responses import json_response, sse
from quire_server.speech.request import SpeechRequest
from quire_speech import Segment, TokenLogprob
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
    logprobs = {"logprobs": _logprobs(segments)} if body.include else {}
    return json_response({"text": transcription.text, **logprobs, "usage": usage})


async def events(
    segments: AsyncIterator[Segment | TextDelta],
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
        segments: As they are heard, and before them what is known of their text.
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
    ahead = _Ahead()
    if body.response_format == "vtt":
        yield sse(_delta(common, "WEBVTT\n\n", None, None))
    async for segment in segments:
        if isinstance(segment, TextDelta):
            event = _delta(common, ahead.tell(segment, is_first=not num_cues), None, segment.logprobs)
            yield sse(event | ({"usage": _usage(hearing)} if body.stream_continuous_usage_stats else {}))
            continue
        heard.append(segment)
        segment = ahead.rest_of(segment)
        if not segment.text:
            continue
        num_cues += 1
        if body.response_format == "srt":
            text = srt_cue(num_cues, segment)
        elif body.response_format == "vtt":
            text = vtt_cue(segment)
        else:
            text = segment.text.lstrip() if num_cues == 1 and not ahead.has_told else segment.text
        is_verbose = body.response_format == "verbose_json"
        event = _delta(common, text, segment if is_verbose else None, segment.logprobs)
        if body.stream_continuous_usage_stats:
            event["usage"] = _usage(hearing)
        yield sse(event)
    done = {"type": "transcript.text.done", "text": text_of_segments(heard), "language": hearing.language, **common}
    if body.include:
        done["logprobs"] = _logprobs(heard)
    if body.response_format == "verbose_json":
        done["language_probability"] = hearing.language_probability
    done["choices"] = [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop", "stop_reason": None}]
    yield sse({**done, "usage": _usage(hearing)})
    if body.stream_include_usage:
        yield sse({**common, "choices": [], "usage": _usage(hearing)})


class _Ahead:
    """Text that was told before its segment was there."""

    def __init__(self) -> None:
        self._text, self._num_tokens = "", 0
        self.has_told = False

    def tell(self, delta: TextDelta, *, is_first: bool) -> str:
        """What is sent of it."""
        text = delta.text if self.has_told or not is_first else delta.text.lstrip()
        self._text += delta.text
        self._num_tokens += len(delta.logprobs or ())
        self.has_told = True
        return text

    def rest_of(self, segment: Segment) -> Segment:
        """What was not told of it. A segment that says something else is told whole."""
        text, num_tokens, count = self._text, self._num_tokens, len(segment.logprobs or ())
        self._text, self._num_tokens = "", 0
        if text.startswith(segment.text):
            self._text, self._num_tokens = text[len(segment.text) :], max(0, num_tokens - count)
            return dataclasses.replace(segment, text="", logprobs=None)
        if not segment.text.startswith(text):
            return segment
        logprobs = None if segment.logprobs is None else segment.logprobs[num_tokens:]
        return dataclasses.replace(segment, text=segment.text[len(text) :], logprobs=logprobs)


def _logprobs(segments: Sequence[Segment]) -> list[dict[str, Any]]:
    """In OpenAI's shape."""
    return [_logprob(each) for segment in segments for each in segment.logprobs or ()]


def _logprob(each: TokenLogprob) -> dict[str, Any]:
    return {"token": each.token, "logprob": max(each.logprob, LOWEST), "bytes": list(each.token_bytes)}


def _delta(
    common: dict[str, Any], text: str, segment: Segment | None, logprobs: Sequence[TokenLogprob] | None
) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None, "stop_reason": None}
    event: dict[str, Any] = {"type": "transcript.text.delta", "delta": text, **common, "choices": [choice]}
    if logprobs is not None:
        event["logprobs"] = [_logprob(each) for each in logprobs]
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
