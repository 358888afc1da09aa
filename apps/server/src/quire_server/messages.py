"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API over the same turns as chat completions.

Source of the shapes: Anthropic's public API reference.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire_engine import CompletionOutput, RequestOutput
from quire_renderers import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    replace_lone_surrogates,
)
from quire_server.body import read_model
from quire_server.context import ServerContext, unless_disconnected
from quire_server.errors import messages_error_body, naming_fields
from quire_server.messages_request import CountTokensRequest, MessagesRequest
from quire_server.request_ids import answer_id
from quire_server.request_warnings import warnings_field
from quire_server.streaming import EventStream, after
from quire_server.turn import ChatTurn, RunningTurn, raise_failed, render_turn, start_turn

__all__ = ["count_tokens", "messages", "messages_turn"]

_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "abort": "pause_turn"}
"""Words of the chat API -> Anthropic's. After pause_turn the client may send the answer back to have it continued."""


async def messages(context: ServerContext, request: Request) -> Response:
    """Serve one request; errors of the tree become error bodies in the app."""
    body = await read_model(context, request, MessagesRequest)
    model = context.resolve_model(body.model)
    with naming_fields(body.field_names()):
        running = await start_turn(context, lambda: messages_turn(context, body), is_large=body.is_large)
    answer = _Answer(answer_id(request, "msg_", body.request_id), model, running, context, _extras(body))
    with naming_fields(body.field_names()):
        first = await unless_disconnected(request, anext(running.outputs))
    if not body.stream:
        return Response(_encoder.encode(answer.whole(first)), media_type="application/json")
    events = answer.events(first, running.outputs)
    request_id = request.state.request_id
    return await EventStream.begin(events, end=b"", on_error=lambda error: _sse(messages_error_body(error, request_id)))


async def count_tokens(context: ServerContext, request: Request) -> Response:
    """The tokens of the prompt that the same body has in `messages`."""
    body = await read_model(context, request, CountTokensRequest)
    context.resolve_model(body.model)
    with naming_fields(body.field_names()):
        prompt = await render_turn(context, lambda: messages_turn(context, body), is_large=body.is_large)
    return JSONResponse({"input_tokens": len(prompt.token_ids)})


def messages_turn(context: ServerContext, body: CountTokensRequest) -> ChatTurn:
    """What the request asks of the model. Raises RequestError naming the field at fault."""
    conversation = body.chat_messages(context.modalities)
    return ChatTurn(
        messages=conversation,
        params=context.sampling_params(body),
        tool_use=body.tool_use(),
        continue_final_message=body.prefills(conversation),
        chat_template_kwargs=context.template_kwargs(body.template_kwargs()),
        mm_processor_kwargs=body.mm_processor_kwargs,
        include_reasoning=body.shows_thinking(),
        thinking_token_budget=body.thinking_budget(),
        fills_context=True,
        options=context.request_options(body),
    )


def _extras(body: MessagesRequest) -> dict[str, Any]:
    """What the answer says beside the message: that no edit of the context was made, where one was offered."""
    return {} if body.context_management is None else {"context_management": {"applied_edits": []}}


class _Blocks:
    """Turns parser events into the events of content blocks, in order; remembers the whole blocks."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._is_open = False
        self._json: list[str] = []

    def take(self, events: Sequence[OutputEvent], call_id: Callable[[int, str | None], str]) -> list[dict[str, Any]]:
        events_out: list[dict[str, Any]] = []
        for event in events:
            match event:
                case ContentDelta(text):
                    self._text(events_out, "text", "text", {"type": "text", "text": ""}, text)
                case ReasoningDelta(text):
                    empty = {"type": "thinking", "thinking": "", "signature": ""}
                    self._text(events_out, "thinking", "thinking", empty, text)
                case CallStart(index, name, own):
                    block = {"type": "tool_use", "id": call_id(index, own), "name": name, "input": {}}
                    self._open(events_out, block)
                case CallArguments(_, piece):
                    # The input is part of the answer's own JSON, which strict readers could not read for one escape.
                    piece = replace_lone_surrogates(piece)
                    self._json.append(piece)
                    events_out.append(self._delta({"type": "input_json_delta", "partial_json": piece}))
                case CallEnd():
                    self._close(events_out)
        return events_out

    def _text(self, events_out: list[dict[str, Any]], kind: str, key: str, empty: dict[str, Any], text: str) -> None:
        if not self._is_open or self.blocks[-1]["type"] != kind:
            self._open(events_out, empty)
        self.blocks[-1][key] += text
        events_out.append(self._delta({"type": f"{kind}_delta", key: text}))

    def _open(self, events_out: list[dict[str, Any]], block: dict[str, Any]) -> None:
        self._close(events_out)
        self.blocks.append(block)
        self._is_open, self._json = True, []
        events_out.append({"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)})

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def _close(self, events_out: list[dict[str, Any]]) -> None:
        if not self._is_open:
            return
        self._is_open = False
        block = self.blocks[-1]
        if block["type"] == "tool_use":
            block["input"] = msgspec.Raw("".join(self._json) or "{}")  # as the model wrote it
        elif block["type"] == "thinking":
            events_out.append(self._delta({"type": "signature_delta", "signature": ""}))
        events_out.append({"type": "content_block_stop", "index": len(self.blocks) - 1})

    def finish(self) -> list[dict[str, Any]]:
        events_out: list[dict[str, Any]] = []
        self._close(events_out)
        return events_out


class _Answer:
    """What all pieces of one answer have in common."""

    def __init__(
        self, name: str, model: str, running: RunningTurn, context: ServerContext, extras: dict[str, Any]
    ) -> None:
        self._id = name
        self._model = model
        self._running = running
        self._context = context
        self._extras = extras
        self._blocks = _Blocks()

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The answer: the same blocks that a stream would have told."""
        raise_failed(output)
        (completion,) = output.outputs
        self._take(completion)
        self._blocks.finish()
        message = {**self._message(output), "content": self._blocks.blocks, **self._ending(output), **self._extras}
        message["usage"] = self._usage(output, is_last=True)
        return message

    def _take(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        choice = self._running.choices[0]
        return self._blocks.take(choice.take(completion), choice.call_id)

    def _message(self, output: RequestOutput) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**self._usage(output), "output_tokens": 0},  # nothing of it was told yet
            **warnings_field(self._running.turn.warnings),
        }

    def _usage(self, output: RequestOutput, *, is_last: bool = False) -> dict[str, Any]:
        """The prompt's tokens, told apart as found in the prefix cache, left there (the whole blocks behind those that
        were found), and the rest."""
        total, num_cached = len(self._running.prompt.token_ids), max(0, output.num_cached_tokens)
        llm, created = self._context.llm, 0
        if llm.config.kv_cache.enable_prefix_caching and llm.engine.info.block_size:
            created = max(0, total - total % llm.engine.info.block_size - num_cached)
        usage: dict[str, Any] = {
            "input_tokens": total - num_cached - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": num_cached,
            "output_tokens": output.num_generation_tokens,
        }
        if is_last:
            usage["output_tokens_details"] = {"thinking_tokens": self._running.num_reasoning_tokens()}
        return usage

    def _ending(self, output: RequestOutput) -> dict[str, Any]:
        (completion,) = output.outputs
        if isinstance(completion.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
        reason = str(self._running.choices[0].finish_reason(completion))
        stop_reason = _STOP_REASONS.get(reason, "end_turn")
        if stop_reason == "max_tokens" and output.num_generation_tokens < (self._running.turn.params.max_tokens or 0):
            stop_reason = "model_context_window_exceeded"
        return {"stop_reason": stop_reason, "stop_sequence": None}

    async def events(
        self, first: RequestOutput, rest: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[bytes, None]:
        """One element per engine step that has something to tell."""
        opening = _sse({"type": "message_start", "message": self._message(first)}) + _sse({"type": "ping"})
        async with contextlib.aclosing(after(first, rest)) as outputs:
            async for output in outputs:
                raise_failed(output)
                (completion,) = output.outputs
                new_events = self._take(completion)
                if completion.finished:
                    new_events += self._blocks.finish()
                    delta = self._ending(output)
                    usage = self._usage(output, is_last=True)
                    new_events.append({"type": "message_delta", "delta": delta, "usage": usage, **self._extras})
                    new_events.append({"type": "message_stop"})
                if opening or new_events:
                    yield opening + b"".join(map(_sse, new_events))
                opening = b""


_encoder = msgspec.json.Encoder()


def _sse(event: dict[str, Any]) -> bytes:
    kind: str = event["type"]
    return b"event: " + kind.encode() + b"\ndata: " + _encoder.encode(event) + b"\n\n"
