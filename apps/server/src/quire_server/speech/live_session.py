"""The settings of a realtime session, in the shapes of OpenAI's API of today (`session.update`), of its beta
(`transcription_session.update`), and of vLLM (`session.update` with a model alone). Knows no connection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from quire_interfaces import RequestError
from quire_server.body import check_fields
from quire_speech import TranscriptionOptions

__all__ = ["LiveSettings"]

_FORMS: dict[str, Literal["pcm16", "g711_ulaw", "g711_alaw"]] = {
    "audio/pcm": "pcm16", "audio/pcmu": "g711_ulaw", "audio/pcma": "g711_alaw",
    "pcm16": "pcm16", "g711_ulaw": "g711_ulaw", "g711_alaw": "g711_alaw",
}  # fmt: skip
_TYPES = {"pcm16": "audio/pcm", "g711_ulaw": "audio/pcmu", "g711_alaw": "audio/pcma"}


class _Fields(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, strict=True)


class _Format(_Fields):
    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"] = "audio/pcm"
    rate: int = 24_000


class _Transcription(_Fields):
    model: str | None = None
    language: str | None = None
    languages: list[str] | None = None
    prompt: str | None = None
    keywords: list[str] | None = None


class _TurnDetection(_Fields):
    type: Literal["server_vad"] = "server_vad"
    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500


class _Input(_Fields):
    format: _Format | None = None
    transcription: _Transcription | None = None
    turn_detection: _TurnDetection | None = None


class _Audio(_Fields):
    input: _Input = Field(default_factory=_Input)


class _Session(_Fields):
    type: Literal["transcription"] = "transcription"
    audio: _Audio = Field(default_factory=_Audio)


class _BetaSession(_Fields):
    input_audio_format: Literal["pcm16", "g711_ulaw", "g711_alaw"] | None = None
    input_audio_transcription: _Transcription | None = None
    turn_detection: _TurnDetection | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSettings:
    """What a session was told."""

    form: Literal["pcm16", "g711_ulaw", "g711_alaw"] = "pcm16"
    rate: int = 24_000
    transcription: _Transcription = field(default_factory=_Transcription)
    turn_detection: _TurnDetection | None = field(default_factory=_TurnDetection)
    """None where the client says when a turn ends."""
    is_vllm: bool = False
    """Whether events are those of vLLM."""

    def updated(self, event: Mapping[str, Any]) -> LiveSettings:
        """The settings after an event. What it does not name stays.

        Args:
            event: Of type `session.update` or `transcription_session.update`.

        Raises:
            RequestError: naming the field.
        """
        session = event.get("session")
        if session is None and event["type"] == "session.update":
            transcription = check_fields({"model": event.get("model")}, _Transcription)
            return replace(
                self, is_vllm=True, form="pcm16", rate=16_000, turn_detection=None, transcription=transcription
            )
        if not isinstance(session, dict):
            raise RequestError("session must be an object", param="session")
        if event["type"] == "transcription_session.update":
            return self._of_beta(session)
        return self._of_session(session)

    def _of_session(self, session: dict[str, Any]) -> LiveSettings:
        if session.get("type", "transcription") != "transcription":
            raise RequestError(
                "this server transcribes and does not converse; session.type must be 'transcription'",
                param="session.type",
                code="unsupported",
            )
        given = check_fields(session, _Session).audio.input
        raw = ((session.get("audio") or {}).get("input")) or {}
        changed = self._changed(raw, given.transcription, given.turn_detection)
        if given.format is None:
            return changed
        form = _FORMS[given.format.type]
        return replace(changed, form=form, rate=8_000 if form != "pcm16" else given.format.rate)

    def _of_beta(self, session: dict[str, Any]) -> LiveSettings:
        given = check_fields(session, _BetaSession)
        raw = {"turn_detection": session["turn_detection"]} if "turn_detection" in session else {}
        if "input_audio_transcription" in session:
            raw["transcription"] = session["input_audio_transcription"]
        changed = self._changed(raw, given.input_audio_transcription, given.turn_detection)
        if given.input_audio_format is None:
            return changed
        form = _FORMS[given.input_audio_format]
        return replace(changed, form=form, rate=8_000 if form != "pcm16" else 24_000)

    def _changed(
        self, raw: Mapping[str, Any], transcription: _Transcription | None, turn_detection: _TurnDetection | None
    ) -> LiveSettings:
        changed = self
        if "transcription" in raw:
            changed = replace(changed, transcription=transcription or _Transcription())
        if "turn_detection" in raw:
            changed = replace(changed, turn_detection=turn_detection)
        if len(changed.transcription.languages or ()) > 1:
            raise RequestError("one language at most; leave languages out to have it heard", param="languages")
        changed.options()
        return changed

    def options(self) -> TranscriptionOptions:
        """How turns are transcribed. Raises RequestError."""
        given = self.transcription
        return TranscriptionOptions(
            language=given.language or next(iter(given.languages or ()), None),
            prompt=given.prompt or None,
            hotwords=" ".join(given.keywords or ()) or None,
        )

    def object(self, session_id: str) -> dict[str, Any]:
        """The session as OpenAI shows it. Noise is not reduced, whatever was asked for."""
        sound: dict[str, Any] = {"type": _TYPES[self.form]}
        if self.form == "pcm16":
            sound["rate"] = self.rate
        return {
            "id": session_id,
            "object": "realtime.transcription_session",
            "type": "transcription",
            "audio": {
                "input": {
                    "format": sound,
                    "transcription": self.transcription.model_dump(exclude_none=True),
                    "turn_detection": None if self.turn_detection is None else self.turn_detection.model_dump(),
                    "noise_reduction": None,
                }
            },
            "include": None,
        }

    def beta_object(self, session_id: str) -> dict[str, Any]:
        """The session as OpenAI's beta shows it."""
        return {
            "id": session_id,
            "object": "realtime.transcription_session",
            "input_audio_format": self.form,
            "input_audio_transcription": self.transcription.model_dump(exclude_none=True),
            "turn_detection": None if self.turn_detection is None else self.turn_detection.model_dump(),
            "modalities": ["text"],
        }
