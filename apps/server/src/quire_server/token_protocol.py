"""Bodies of the routes that speak token ids: generate, render and derender, in vLLM's shapes.

`sampling_params` are those of `SamplingParams`, by its names. Knows no engine.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal

import msgspec
from pydantic import Field

from quire_interfaces import RequestError, SamplingParams
from quire_server.protocol import (
    Body,
    ChatCompletionRequest,
    CompletionRequest,
    Int,
    StreamOptions,
    TokenId,
)

__all__ = [
    "BatchChatCompletionRequest",
    "DerenderChatRequest",
    "DerenderChatStreamRequest",
    "DerenderCompletionRequest",
    "GenerateChunk",
    "GenerateRequest",
    "GenerateResponse",
    "GenerateResponseChoice",
    "ThinkingBounds",
    "sampling_params_from",
    "sampling_params_to_json",
]

DEFAULT_MAX_TOKENS = 16
"""Of this route, as vLLM has it."""


class BatchChatCompletionRequest(ChatCompletionRequest):
    """Body of POST /v1/chat/completions/batch: several conversations with the same parameters."""

    messages: list[list[dict[str, Any]]] = Field(min_length=1)  # type: ignore[assignment]

    def check_supported(self) -> None:
        super().check_supported()
        for name, wrong in (
            ("stream", self.stream),
            ("tools", self.tools),
            ("functions", self.functions),
            ("n", self.n not in (None, 1)),
        ):
            if wrong:
                raise RequestError(
                    f"{name} cannot be had for several conversations at once: leave it out, or send them one by one",
                    param=name,
                )


class ThinkingBounds(Body):
    """What generation must know to write into the answer: the end of the thinking, the beginning of a call."""

    budget: Int | None = None
    """Most tokens of thinking; None for no bound."""
    forced: str = ""
    """How the answer begins behind the thinking."""
    thinks: bool = True
    """Whether the thinking may come before `forced`."""
    is_open: bool = False
    """Whether the prompt ends inside the thinking."""
    tools: list[dict[str, Any]] | None = None
    """Tools whose calls are looked for, which may end the thinking."""
    skip_special_tokens: bool = True
    """Whether special tokens are no part of what is read."""


class GenerateRequest(Body):
    """Body of POST /inference/v1/generate, and what the render routes answer."""

    token_ids: list[TokenId] = Field(min_length=1)
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    model: str | None = None
    request_id: str | None = Field(default=None, min_length=1, max_length=256)
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    priority: Int = 0
    output_mode: Literal["tokens", "text"] = "tokens"
    thinking: ThinkingBounds | None = None
    kv_transfer_params: Any = None


class GenerateResponseChoice(Body):
    """One completion as token ids."""

    index: Int = 0
    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None


class GenerateResponse(Body):
    """What /inference/v1/generate answered, as the derender routes take it."""

    request_id: str | None = None
    choices: list[GenerateResponseChoice]


class GenerateChunk(GenerateResponse):
    """One event of its stream; the last one may hold only usage, or an error."""

    choices: list[GenerateResponseChoice] = Field(default_factory=list)
    error: dict[str, Any] | None = None


class DerenderChatStreamRequest(Body):
    """First event of a body of events for POST /v1/chat/completions/derender; the chunks come behind it."""

    model: str | None = None
    chat_request: ChatCompletionRequest | None = None
    prompt_tokens: Int | None = None


class DerenderChatRequest(Body):
    """Body of POST /v1/chat/completions/derender."""

    generate_response: GenerateResponse
    model: str | None = None
    chat_request: ChatCompletionRequest | None = None
    prompt_tokens: Int | None = None
    stream: Literal[False] = False


class DerenderCompletionRequest(Body):
    """Body of POST /v1/completions/derender."""

    generate_responses: list[GenerateResponse] = Field(min_length=1)
    model: str | None = None
    completion_request: CompletionRequest | None = None
    prompt_tokens: list[Int] | Int | None = None
    stream: Literal[False] = False


def sampling_params_from(values: dict[str, Any]) -> SamplingParams:
    """Parameters from JSON.

    Raises:
        RequestError: naming `sampling_params.FIELD`.
    """
    if isinstance(values.get("stop"), str):
        values = {**values, "stop": [values["stop"]]}
    known = {name: value for name, value in values.items() if value is not None}
    if "max_tokens" not in values:  # null is up to the context's end
        known["max_tokens"] = DEFAULT_MAX_TOKENS
    try:
        return msgspec.convert(known, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        name = f"sampling_params{path.rstrip('`')}"
        raise RequestError(f"{name}: {message[:1].lower()}{message[1:]}", param=name) from None
    except RequestError as error:
        error.param = f"sampling_params.{error.param}"
        raise


_DEFAULTS = SamplingParams()


def sampling_params_to_json(params: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults, so that `sampling_params_from` gives the same again."""
    changed = {
        spec.name: getattr(params, spec.name)
        for spec in fields(params)
        if spec.name == "max_tokens" or getattr(params, spec.name) != getattr(_DEFAULTS, spec.name)
    }
    result: dict[str, Any] = msgspec.to_builtins(changed, str_keys=True)
    return result
