"""The form of `/v1/audio/transcriptions` and `/v1/audio/translations`: OpenAI's fields, and vLLM's by their names.

Fields of a form are texts; lists are fields that repeat, or end with `[]`; objects are JSON, or fields like
`chunking_strategy[type]`. Knows no engine.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from quire_interfaces import RequestError
from quire_server.body import check_fields
from quire_server.errors import naming_fields
from quire_server.request_fields import Int
from quire_speech import TranscriptionOptions

__all__ = ["FORM", "SpeechRequest", "VoiceFields", "read_fields"]

_LISTS = (
    "timestamp_granularities", "include", "keywords", "languages", "known_speaker_names", "known_speaker_references",
)  # fmt: skip
_OBJECTS = ("chunking_strategy", "vad_config", "vllm_xargs")
_LANGUAGE = re.compile(r"[A-Za-z][A-Za-z -]{1,40}")
_NAMES = {"temperatures": "temperature", "beam_size": "n", "max_tokens": "max_completion_tokens", "logprobs": "include"}
"""The engine's name of a field -> the form's."""


class VoiceFields(BaseModel):
    """What is speech, in OpenAI's names (`chunking_strategy`); vLLM's (`vad_config.*`) are made into these."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)
    type: Literal["server_vad"] = "server_vad"
    threshold: float = 0.5
    prefix_padding_ms: int = 400
    silence_duration_ms: int = 2000
    min_speech_ms: int = 96
    max_speech_s: float | None = None

    def settings(self) -> dict[str, Any]:
        """Arguments of `VoiceSettings`."""
        return self.model_dump(exclude={"type"}, exclude_none=True)


class SpeechRequest(BaseModel):
    """A form without its file. Unknown fields are ignored, as OpenAI-compatible servers do."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)
    task: ClassVar[Literal["transcribe", "translate"]] = "transcribe"

    model: str | None = None
    language: str | None = None
    languages: list[str] = Field(default_factory=list)
    prompt: str | None = None
    hotwords: str | None = None
    keywords: list[str] = Field(default_factory=list)
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json", "diarized_json"] = "json"
    temperature: float | None = None
    timestamp_granularities: list[Literal["word", "segment"]] = Field(default_factory=list)
    include: list[Literal["logprobs"]] = Field(default_factory=list)
    chunking_strategy: Literal["auto"] | VoiceFields | None = None
    vad_config: dict[str, Any] | None = None
    stream: bool | None = None
    stream_include_usage: bool | None = None
    stream_continuous_usage_stats: bool | None = None
    to_language: str | None = None
    use_beam_search: bool = False
    n: Int = 1
    length_penalty: float | None = None
    max_completion_tokens: Int | None = None
    seed: Int | None = None
    top_p: float = 1.0
    top_k: Int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    known_speaker_names: list[str] = Field(default_factory=list)
    known_speaker_references: list[str] = Field(default_factory=list)
    priority: Int = 0
    cache_salt: str | None = None
    request_id: str | None = None
    vllm_xargs: dict[str, Any] | None = None

    def check(self) -> None:
        """Raises RequestError for fields that contradict each other."""
        if not self.stream:
            for name in ("stream_include_usage", "stream_continuous_usage_stats"):
                if getattr(self, name):
                    raise RequestError(f"{name} is for streams; set stream to true or leave it out", param=name)
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise RequestError(
                f"timestamp_granularities needs response_format verbose_json, got {self.response_format}",
                param="timestamp_granularities",
            )
        if self.include and self.response_format != "json":
            raise RequestError(
                f"include needs response_format json, got {self.response_format}; the segments of verbose_json have "
                "avg_logprob",
                param="include",
            )
        for name in ("language", "to_language"):
            value = getattr(self, name)
            if value is not None and not _LANGUAGE.fullmatch(value):
                raise RequestError(
                    f"{name} must be a code such as en, or a name such as english, got {reprlib.repr(value)}",
                    param=name,
                )
        if self.n > 1 and not self.use_beam_search:
            raise RequestError("n is the number of beams; it needs use_beam_search", param="n")
        if len(self.languages) > 1:
            raise RequestError("one language at most; leave languages out to have it heard", param="languages")

    @property
    def granularities(self) -> tuple[str, ...]:
        """What verbose_json has lists of."""
        return tuple(self.timestamp_granularities) or ("segment",)

    def voice(self) -> VoiceFields | None:
        """What is speech, where silence is to be left out before the model hears it; None where it is not."""
        if self.chunking_strategy == "auto":
            return VoiceFields()
        if self.chunking_strategy is not None:
            return self.chunking_strategy
        fields = self.vad_config or {}
        if str(fields.get("enabled", "false")).lower() not in ("true", "1"):
            return None
        names = {
            "threshold": "threshold", "speech_pad_ms": "prefix_padding_ms", "min_speech_duration_ms": "min_speech_ms",
            "min_silence_duration_ms": "silence_duration_ms", "max_speech_duration_s": "max_speech_s",
        }  # fmt: skip
        return check_fields({names[name]: value for name, value in fields.items() if name in names}, VoiceFields)

    def options(self, task: Literal["transcribe", "translate"]) -> TranscriptionOptions:
        """How the model transcribes.

        Args:
            task: Of the route.

        Raises:
            RequestError: naming the field.
        """
        hotwords = " ".join(each for each in (self.hotwords, *self.keywords) if each)
        more: dict[str, Any] = {"temperatures": (self.temperature,)} if self.temperature else {}
        with naming_fields(_NAMES):
            return TranscriptionOptions(
                task=task,
                to_language=self.to_language or "en",
                language=self.language or next(iter(self.languages), None),
                prompt=self.prompt or None,
                hotwords=hotwords or None,
                beam_size=self.n if self.use_beam_search else 1,
                length_penalty=self.length_penalty,
                word_timestamps="word" in self.timestamp_granularities,
                logprobs=bool(self.include),
                max_tokens=self.max_completion_tokens,
                seed=self.seed,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                **more,
            )


def read_fields(values: Iterable[tuple[str, str]]) -> SpeechRequest:
    """The fields of a form, checked.

    Args:
        values: (name, text) of each, in order.

    Raises:
        RequestError: naming the field.
    """
    fields: dict[str, Any] = {}
    for name, text in values:
        base = name.removesuffix("[]")
        if base in _LISTS:
            fields.setdefault(base, []).append(text)
        elif name in _OBJECTS and text.lstrip().startswith("{"):
            fields[name] = _object(name, text)
        elif (found := re.fullmatch(rf"({'|'.join(_OBJECTS)})(?:\[(\w+)\]|\.(\w+))", name)) is not None:
            fields.setdefault(found[1], {})[found[2] or found[3]] = text
        elif text or base != name:
            fields[base] = text
    request = check_fields(fields, SpeechRequest)
    request.check()
    return request


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name} must be a JSON object: {error}", param=name) from None
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be a JSON object, got {type(value).__name__}", param=name)
    return value


def _form() -> dict[str, Any]:
    schema = SpeechRequest.model_json_schema()
    properties = {
        (f"{name}[]" if name in _LISTS else name): field
        for name, field in schema["properties"].items()
        if name not in _OBJECTS
    }
    texts = {name: {"type": "string"} for name in _OBJECTS}
    file = {"file": {"type": "string", "format": "binary"}}
    return {"type": "object", "required": ["file"], "properties": {**file, **properties, **texts}}


FORM = _form()
"""JSON schema of the form."""
