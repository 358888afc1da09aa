"""The routes of speech: path, handler, form, answer."""

from __future__ import annotations

from typing import Any, Protocol

from quire_server.context import ServerContext
from quire_server.openapi import JSON_OR_EVENTS, TEXT, Form
from quire_server.speech.live_secrets import (
    ClientSecretRequest,
    TranscriptionSessionRequest,
    client_secrets,
    transcription_sessions,
)
from quire_server.speech.request import FORM
from quire_server.speech.service import SpeechService, speak

__all__ = ["add_speech_routes"]


class _Routes(Protocol):
    def add(self, method: str, path: str, handler: Any, answers: Any = ..., *, body: Any = None) -> None: ...


def add_speech_routes(routes: _Routes, context: ServerContext) -> SpeechService:
    """Add them to a server's; what answers them."""
    service = SpeechService(context.config)
    context.state.background.append(service.close_at_end)
    answers = {**JSON_OR_EVENTS, **TEXT}
    routes.add("POST", "/v1/audio/transcriptions", service.transcriptions, answers, body=Form(FORM))
    routes.add("POST", "/v1/audio/translations", service.translations, answers, body=Form(FORM))
    routes.add("POST", "/v1/audio/speech", speak)
    routes.add("POST", "/v1/realtime/client_secrets", client_secrets, body=ClientSecretRequest)
    routes.add("POST", "/v1/realtime/transcription_sessions", transcription_sessions, body=TranscriptionSessionRequest)
    return service
