"""`POST /v1/realtime/client_secrets` and `/v1/realtime/transcription_sessions`: keys for a few minutes, by which
browsers open `/v1/realtime`. Source of the shapes: OpenAI's public API reference."""

from __future__ import annotations

import secrets
import time
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from quire_interfaces import RequestError
from quire_server.body import read_model
from quire_server.client_secrets import make_client_secret
from quire_server.context import ServerContext
from quire_server.responses import json_response
from quire_server.speech.live_session import LiveSettings

__all__ = ["ClientSecretRequest", "TranscriptionSessionRequest", "client_secrets", "transcription_sessions"]

_LEAST_S, _MOST_S, _USUAL_S = 10, 7200, 600
_BETA_S = 60
"""A session of the beta begins so soon."""


class _ExpiresAfter(BaseModel):
    anchor: Literal["created_at"] = "created_at"
    seconds: int = _USUAL_S


class ClientSecretRequest(BaseModel):
    """What a secret is for. Unknown fields are ignored, as everywhere."""

    model_config = ConfigDict(extra="ignore", strict=True)
    expires_after: _ExpiresAfter = Field(default_factory=_ExpiresAfter)
    session: dict[str, Any] = Field(default_factory=lambda: {"type": "transcription"})


class TranscriptionSessionRequest(BaseModel):
    """A session of the beta; its fields are those of `transcription_session.update`."""

    model_config = ConfigDict(extra="allow")


async def client_secrets(context: ServerContext, request: Request) -> Response:
    """A key for a few minutes that opens realtime sessions with these settings, and nothing else."""
    body = await read_model(context, request, ClientSecretRequest)
    seconds = body.expires_after.seconds
    if not _LEAST_S <= seconds <= _MOST_S:
        raise RequestError(
            f"expires_after.seconds must be from {_LEAST_S} to {_MOST_S}, got {seconds}", param="expires_after.seconds"
        )
    update = {"type": "session.update", "session": body.session}
    settings = _checked(context, update)
    expires_at = int(time.time()) + seconds
    value = make_client_secret(context.api_keys, context.caller, update, expires_at)
    return json_response({"value": value, "expires_at": expires_at, "session": settings.object(_session_id())})


async def transcription_sessions(context: ServerContext, request: Request) -> Response:
    """The same in the shape of OpenAI's beta: a session with its `client_secret`."""
    body = await read_model(context, request, TranscriptionSessionRequest)
    update = {"type": "transcription_session.update", "session": body.model_extra or {}}
    settings = _checked(context, update)
    expires_at = int(time.time()) + _BETA_S
    value = make_client_secret(context.api_keys, context.caller, update, expires_at)
    session = settings.beta_object(_session_id())
    return json_response({**session, "client_secret": {"value": value, "expires_at": expires_at}})


def _checked(context: ServerContext, update: dict[str, Any]) -> LiveSettings:
    """The settings that sessions begin with. Raises RequestError, ModelNotFoundError."""
    settings = LiveSettings().updated(update)
    if settings.transcription.model is not None:
        context.resolve_model(settings.transcription.model)
    return settings


def _session_id() -> str:
    return f"sess_{secrets.token_hex(12)}"
