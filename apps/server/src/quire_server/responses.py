"""The response bodies of the text routes, as msgspec structs: fast to encode, fields in the order of the OpenAI API.

A field that is UNSET is left out; None is sent as null. What clients read as attributes is null where there is nothing
to say; only the delta of a chunk leaves out what it does not change, as OpenAI's do. Streaming chunks and whole
responses are built from the same pieces. Knows no engine but the times of a request.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from quire_server.request_timings import RequestTimings
from quire_server.request_warnings import RequestWarning

__all__ = [
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatLogprobs",
    "ChatMessage",
    "ChatTokenLogprob",
    "Completion",
    "CompletionChoice",
    "CompletionLogprobs",
    "CompletionTokensDetails",
    "CustomCall",
    "Delta",
    "FunctionCall",
    "PromptTokensDetails",
    "ToolCall",
    "ToolCallDelta",
    "TopLogprob",
    "Usage",
    "json_response",
    "sse",
]


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0
    audio_tokens: None = None


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0
    audio_tokens: None = None
    accepted_prediction_tokens: None = None
    rejected_prediction_tokens: None = None


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
    """None for routes that tell no reasoning apart."""

    @classmethod
    def of(
        cls, prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int | None = None
    ) -> Usage:
        total = prompt_tokens + completion_tokens
        usage = cls(prompt_tokens, completion_tokens, total, PromptTokensDetails(max(0, cached_tokens)))
        if reasoning_tokens is not None:
            usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens)
        return usage

    @classmethod
    def sum(cls, usages: list[Usage]) -> Usage:
        """Of several answers together."""
        reasoning = [each.completion_tokens_details for each in usages]
        return cls.of(
            sum(each.prompt_tokens for each in usages),
            sum(each.completion_tokens for each in usages),
            sum(each.prompt_tokens_details.cached_tokens for each in usages),
            sum(each.reasoning_tokens for each in reasoning if isinstance(each, CompletionTokensDetails))
            if any(isinstance(each, CompletionTokensDetails) for each in reasoning)
            else None,
        )


class PackedLogprobs(msgspec.Struct):
    """The most likely tokens of each place as two arrays, row by row, in base64; vLLM's form."""

    token_ids_b64: str
    logprobs_b64: str
    shape: tuple[int, int]
    """Tokens, candidates of each."""
    token_ids_dtype: str = "<i4"
    logprobs_dtype: str = "<f4"


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one element per token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]
    """Empty where they are packed."""
    packed_top_logprobs: PackedLogprobs | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string; an extension."""
    prompt_logprobs: list[Any] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    routed_experts: str | UnsetType = UNSET
    """With the end, where the engine returns them (`experts_text`)."""


class Completion(msgspec.Struct, kw_only=True):
    """Whole response and streaming chunk have the same form."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    deterministic: bool
    """A repetition of this request gives the same tokens, whatever is served beside it; an extension."""
    choices: list[CompletionChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    service_tier: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    """Where keys and values are held, for the engine that goes on."""
    metrics: RequestTimings | UnsetType | None = UNSET
    """With --enable-per-request-metrics; of a stream with its usage."""


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CustomCall(msgspec.Struct, kw_only=True):
    """A call of a custom tool, whose argument is text."""

    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: str = "function"
    function: FunctionCall | UnsetType = UNSET
    custom: CustomCall | UnsetType = UNSET
    """In place of `function`, with the type "custom"."""


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """`reasoning`, under its older name."""
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None
    """In place of `tool_calls`, for requests with `functions`."""


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: str | UnsetType = UNSET
    """With the end, where the engine returns them (`experts_text`)."""


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    deterministic: bool
    """A repetition of this request gives the same tokens, whatever is served beside it; an extension."""
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    service_tier: str | None = None
    metadata: dict[str, str] | None = None
    warnings: list[RequestWarning] | UnsetType = UNSET
    """What of the request was passed over; an extension."""
    prompt_logprobs: list[Any] | None = None
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    """Where keys and values are held, for the engine that goes on."""
    metrics: RequestTimings | UnsetType | None = UNSET
    """With --enable-per-request-metrics; of a stream with its usage."""


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """A piece of a call: id, type and name with the first one, then more of the arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCall | UnsetType = UNSET
    custom: CustomCall | UnsetType = UNSET


class Delta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: str | UnsetType = UNSET
    """With the end, where the engine returns them (`experts_text`)."""


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    deterministic: bool
    """A repetition of this request gives the same tokens, whatever is served beside it; an extension."""
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    service_tier: str | None = None
    warnings: list[RequestWarning] | UnsetType = UNSET
    """With the first chunk."""
    prompt_logprobs: list[Any] | None = None
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    """With the first chunk."""
    metrics: RequestTimings | UnsetType | None = UNSET
    """With --enable-per-request-metrics, together with the usage."""


_encoder = msgspec.json.Encoder()


def json_response(value: Any) -> Response:
    """A whole answer. Lists of a million token ids are written at C's speed."""
    return Response(_encoder.encode(value), media_type="application/json")


def sse(event: msgspec.Struct | dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _encoder.encode(event) + b"\n\n"
