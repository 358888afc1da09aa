"""POST /v2/chat: a conversation to the assistant's next message, whole or as Cohere's events."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire_engine import CompletionOutput, RequestOutput
from quire_interfaces import RequestError
from quire_renderers import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    replace_lone_surrogates,
)
from quire_server.body import check_fields, read_model
from quire_server.chat import chat_turn
from quire_server.cohere_chat.protocol import FIELD_NAMES, CohereChatRequest
from quire_server.context import ServerContext, unless_disconnected
from quire_server.errors import error_body, naming_fields
from quire_server.protocol import ChatCompletionRequest
from quire_server.request_ids import answer_id
from quire_server.responses import json_response
from quire_server.streaming import EventStream, after
from quire_server.turn import ChatTurn, RunningTurn, raise_failed, start_turn

__all__ = ["CohereChatAnswer", "cohere_chat"]

_FINISH_REASONS = {"stop": "COMPLETE", "length": "MAX_TOKENS", "tool_calls": "TOOL_CALL"}


class CohereLogprobs(msgspec.Struct):
    text: str
    token_ids: list[int]
    logprobs: list[float]


class CohereTokens(msgspec.Struct):
    input_tokens: int
    output_tokens: int


class CohereUsage(msgspec.Struct):
    billed_units: CohereTokens
    tokens: CohereTokens
    cached_tokens: int


class CohereMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: list[dict[str, Any]] | None = None
    """Parts of type text and thinking."""
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class CohereChatAnswer(msgspec.Struct, kw_only=True):
    id: str
    finish_reason: str
    message: CohereMessage
    usage: CohereUsage
    logprobs: list[CohereLogprobs] | UnsetType = UNSET


async def cohere_chat(context: ServerContext, request: Request) -> Response:
    """A conversation in Cohere's form to the next message, whole or as events."""
    body = await read_model(context, request, CohereChatRequest)
    context.resolve_model(body.model)
    with naming_fields(FIELD_NAMES):
        running = await start_turn(context, lambda: _turn(context, body), is_large=body.is_large)
        answer = _Answer(answer_id(request, ""), running)
        first = await unless_disconnected(request, anext(running.outputs))
    if not body.stream:
        return json_response(answer.whole(first))
    events = answer.events(first, running.outputs)
    return await EventStream.begin(events, on_error=answer.failure)


def _turn(context: ServerContext, body: CohereChatRequest) -> ChatTurn:
    template = str(context.llm.renderer.tokenizer_config.get("chat_template") or "")
    if body.documents and "documents" not in template:
        raise RequestError(
            "the chat template of this model reads no documents: put them into a message", param="documents"
        )
    turn = chat_turn(context, check_fields(body.chat_fields(), ChatCompletionRequest))
    return dataclasses.replace(turn, fills_context=True)


class _Answer:
    """What all events of one answer have in common."""

    def __init__(self, name: str, running: RunningTurn) -> None:
        self._id, self._running = name, running
        self._parts: list[dict[str, Any]] = []
        """Of the content, in order."""
        self._calls: list[dict[str, Any]] = []
        self._is_open = False
        """The last part of the content goes on."""

    def whole(self, output: RequestOutput) -> CohereChatAnswer:
        raise_failed(output)
        (completion,) = output.outputs
        self._take(completion)
        answer = CohereChatAnswer(
            id=self._id,
            finish_reason=self._finish_reason(completion),
            message=CohereMessage(content=self._parts or None, tool_calls=self._calls or UNSET),
            usage=self._usage(output),
        )
        if completion.logprobs is not None:
            answer.logprobs = _logprobs(completion)
        return answer

    async def events(
        self, first: RequestOutput, rest: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[bytes, None]:
        """One element for each step that has something to tell."""
        message = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": []}
        opening = _sse({"type": "message-start", "id": self._id, "delta": {"message": message}})
        async with contextlib.aclosing(after(first, rest)) as outputs:
            async for output in outputs:
                raise_failed(output)
                (completion,) = output.outputs
                events = self._take(completion)
                if completion.finished:
                    events += self._close()
                    ending = {"finish_reason": self._finish_reason(completion), "usage": self._usage(output)}
                    events.append({"type": "message-end", "id": self._id, "delta": ending})
                if opening or events:
                    yield opening + b"".join(map(_sse, events))
                opening = b""

    def failure(self, error: BaseException) -> bytes:
        """The last event of a stream that fails."""
        delta = {"finish_reason": "ERROR", "error": error_body(error)["error"]["message"]}
        return _sse({"type": "message-end", "id": self._id, "delta": delta})

    def _take(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        """The events of new text, thinking and calls."""
        choice, events_out = self._running.choices[0], list[dict[str, Any]]()
        for event in choice.take(completion):
            self._add(event, events_out)
        if completion.logprobs:
            logprobs = _joined(_logprobs(completion))
            telling = next((each for each in events_out if each["type"] == "content-delta"), None)
            if telling is not None:
                telling["logprobs"] = logprobs
        return events_out

    def _add(self, event: OutputEvent, events_out: list[dict[str, Any]]) -> None:
        choice = self._running.choices[0]
        match event:
            case ContentDelta(text):
                self._add_text("text", text, events_out)
            case ReasoningDelta(text):
                self._add_text("thinking", text, events_out)
            case CallStart(index, name, own):
                events_out += self._close()
                call = {"id": choice.call_id(index, own), "type": "function"}
                self._calls.append({**call, "function": {"name": name, "arguments": ""}})
                events_out.append(
                    _call_event("tool-call-start", index, {**call, "function": {"name": name, "arguments": ""}})
                )
            case CallArguments(index, piece):
                piece = replace_lone_surrogates(piece)
                self._calls[index]["function"]["arguments"] += piece
                events_out.append(_call_event("tool-call-delta", index, {"function": {"arguments": piece}}))
            case CallEnd(index):
                events_out.append({"type": "tool-call-end", "index": index})

    def _add_text(self, kind: str, text: str, events_out: list[dict[str, Any]]) -> None:
        if not self._is_open or self._parts[-1]["type"] != kind:
            events_out += self._close()
            self._parts.append({"type": kind, kind: ""})
            self._is_open = True
            events_out.append(self._content_event("content-start", {"type": kind, kind: ""}))
        self._parts[-1][kind] += text
        events_out.append(self._content_event("content-delta", {kind: text}))

    def _content_event(self, kind: str, content: dict[str, Any]) -> dict[str, Any]:
        return {"type": kind, "index": len(self._parts) - 1, "delta": {"message": {"content": content}}}

    def _close(self) -> list[dict[str, Any]]:
        if not self._is_open:
            return []
        self._is_open = False
        return [{"type": "content-end", "index": len(self._parts) - 1}]

    def _finish_reason(self, completion: CompletionOutput) -> str:
        if isinstance(completion.stop_reason, str):
            return "STOP_SEQUENCE"
        return _FINISH_REASONS.get(str(self._running.choices[0].finish_reason(completion)), "ERROR")

    def _usage(self, output: RequestOutput) -> CohereUsage:
        tokens = CohereTokens(len(self._running.prompt.token_ids), output.num_generation_tokens)
        return CohereUsage(tokens, tokens, max(0, output.num_cached_tokens))


def _call_event(kind: str, index: int, call: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "index": index, "delta": {"message": {"tool_calls": call}}}


def _logprobs(completion: CompletionOutput) -> list[CohereLogprobs]:
    """The chosen tokens, one by one."""
    return [
        CohereLogprobs(sampled.decoded_token, [sampled.token_id], [max(sampled.logprob, -9999.0)])
        for sampled, *_ in completion.logprobs or ()
    ]


def _joined(tokens: Sequence[CohereLogprobs]) -> CohereLogprobs:
    return CohereLogprobs(
        "".join(each.text for each in tokens),
        [token_id for each in tokens for token_id in each.token_ids],
        [logprob for each in tokens for logprob in each.logprobs],
    )


_encoder = msgspec.json.Encoder()


def _sse(event: dict[str, Any]) -> bytes:
    kind: str = event["type"]
    return b"event: " + kind.encode() + b"\ndata: " + _encoder.encode(event) + b"\n\n"
