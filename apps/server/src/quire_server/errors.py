"""From our error tree to HTTP: status codes and error bodies, OpenAI's, below `/v1/messages` Anthropic's, and below
`/api/` Ollama's."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from quire_interfaces import (
    ContextLengthError,
    EngineDeadError,
    ModelNotFoundError,
    OverloadedError,
    QuireError,
    RequestError,
)

__all__ = [
    "OLLAMA_PATHS",
    "ClientGoneError",
    "HTTPError",
    "error_body",
    "error_response",
    "messages_error_body",
    "naming_fields",
    "ollama_error_body",
    "status_of",
]

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    414: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable_error",
}
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_MESSAGES_PATH = "/v1/messages"
OLLAMA_PATHS = "/api/"
"""All routes of Ollama's API begin so."""


class ClientGoneError(Exception):
    """The client closed the connection; nobody will read an answer."""


class HTTPError(QuireError):
    """A refusal that is about HTTP itself (credentials, size, content type), not about a field."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        signal: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.signal = signal
        """Name of the signal that ended the process that computed the request; None where none did."""
        self.headers = headers or {}


def status_of(error: BaseException) -> int:
    """The HTTP status of an error; 500 for what is not in our tree."""
    if isinstance(error, HTTPError):
        return error.status
    if isinstance(error, ModelNotFoundError):
        return 404
    if isinstance(error, (RequestError, ContextLengthError)):
        return 400
    if isinstance(error, OverloadedError):
        return 429
    if isinstance(error, EngineDeadError):
        return 503
    return 500


@contextlib.contextmanager
def naming_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about a field raised inside name it as the client does: `names` maps the engine's name to the client's."""
    try:
        yield
    except RequestError as error:
        old, new = error.param or "", names.get(error.param or "")
        if new is not None:
            error.param = new
            if old != "prompt":  # "the prompt has 9 tokens" is no name of a field
                error.args = (re.sub(rf"(?<![\w-]){re.escape(old)}\b", new, str(error)), *error.args[1:])
        raise


def error_body(error: BaseException) -> dict[str, Any]:
    """The OpenAI error object. The text of an unexpected error stays in the log."""
    status = status_of(error)
    message = str(error) if isinstance(error, QuireError) else "internal error; the server's log has the details"
    message = _too_long_for_chat(error) or message
    signal = getattr(error, "signal", None)
    return {
        "error": {
            "message": message,
            "type": _TYPES.get(status, "internal_error"),
            "param": getattr(error, "param", None),
            "code": getattr(error, "code", None),
            **({} if signal is None else {"signal": signal}),
        }
    }


_PARTS = {"prompt": "prompt", "messages": "messages", "max_tokens": "messages", "max_completion_tokens": "messages"}
"""Field of chat completions or completions -> what is too long."""


def _too_long_for_chat(error: BaseException) -> str | None:
    """A full context in the words by which OpenAI's clients know it, before what this server says of it."""
    if not isinstance(error, ContextLengthError) or error.code != "context_length_exceeded":
        return None
    part, used = _PARTS.get(error.param or ""), error.num_prompt_tokens
    if part is None or used is None or error.max_model_len is None:
        return None
    if error.max_tokens is None:
        text = f"your {part} resulted in {used} tokens. Please reduce the length of the {part}."
    else:
        text = f"you requested {used + error.max_tokens} tokens ({used} in the {part}, {error.max_tokens} in the"
        text += f" completion). Please reduce the length of the {part} or completion."
    return f"This model's maximum context length is {error.max_model_len} tokens. However, {text} ({error})"


def messages_error_body(error: BaseException, request_id: str | None) -> dict[str, Any]:
    """The body of an error as Anthropic's clients read it."""
    status = status_of(error)
    kind = _MESSAGES_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = _too_long_for_messages(error) or error_body(error)["error"]["message"]
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def _too_long_for_messages(error: BaseException) -> str | None:
    """A prompt that fills the context, in the words by which Anthropic's clients know that they must shorten it."""
    if not isinstance(error, ContextLengthError) or error.param in ("max_tokens", "min_tokens"):
        return None
    if error.num_prompt_tokens is None or error.max_model_len is None:
        return f"prompt is too long: {error}"
    # A prompt that fills the context to the last token leaves none for the answer.
    most = min(error.max_model_len, error.num_prompt_tokens - 1)
    return f"prompt is too long: {error.num_prompt_tokens} tokens > {most} maximum"


def ollama_error_body(error: BaseException) -> dict[str, Any]:
    """The body of an error as Ollama's clients read it: a text."""
    return {"error": error_body(error)["error"]["message"]}


def error_response(error: BaseException, scope: Scope) -> Response:
    """A whole response to the request of this scope, with Retry-After where it helps."""
    headers = dict(error.headers) if isinstance(error, HTTPError) else {}
    if isinstance(error, OverloadedError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    status = status_of(error)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status == 408:
        headers["Connection"] = "close"  # the rest of the body may never come
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    if path == _MESSAGES_PATH or path.startswith(_MESSAGES_PATH + "/"):
        body = messages_error_body(error, scope.get("state", {}).get("request_id"))
    elif path.startswith(OLLAMA_PATHS):
        body = ollama_error_body(error)
    else:
        body = error_body(error)
    content = msgspec.json.encode(body)
    return Response(content, status, headers=headers, media_type="application/json")
