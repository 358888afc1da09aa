"""POST /api/chat: a conversation to the assistant's next message, as lines or whole."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire_engine import CompletionOutput, RequestOutput
from quire_interfaces import RequestError
from quire_renderers import CallEnd, ContentDelta, OutputEvent, ParsedCall, ReasoningDelta
from quire_server.body import check_fields, read_model
from quire_server.chat import chat_turn
from quire_server.context import ServerContext, unless_disconnected
from quire_server.errors import naming_fields
from quire_server.ollama.answers import OllamaAnswer, OllamaMessage, Times, done_reason, line, lines, logprobs_of, now
from quire_server.ollama.conversation import chat_messages
from quire_server.ollama.names import own_name
from quire_server.ollama.protocol import OllamaChatRequest, OllamaRequest, keep_alive_s
from quire_server.protocol import ChatCompletionRequest
from quire_server.responses import json_response
from quire_server.streaming import after
from quire_server.turn import ChatTurn, RunningTurn, TurnChoice, raise_failed, start_turn

__all__ = ["chat", "check_thinking", "pieces", "turn_of"]


async def chat(context: ServerContext, request: Request) -> Response:
    """POST /api/chat. Without messages the model is only asked to be there, which it is."""
    body = await read_model(context, request, OllamaChatRequest, any_content_type=True)
    keep_alive_s(body.keep_alive)
    model = context.resolve_model(own_name(context, body.model))
    answer = _ChatAnswer(body.model or model)
    if not body.messages:
        return json_response(answer.loaded())
    if body.tools and context.llm.renderer.chat_format.tools is None:
        raise RequestError(f"{answer.model} does not support tools", param="tools", code="unsupported")
    fields = {"messages": chat_messages(body.messages), "tools": body.tools}
    with naming_fields(body.field_names()):
        running = await start_turn(context, lambda: turn_of(context, body, model, fields), is_large=body.is_large)
        first = await unless_disconnected(request, anext(running.outputs))
    if not body.stream:
        return json_response(answer.whole(running, first))
    return await lines(answer.lines(running, first))


def turn_of(context: ServerContext, body: OllamaRequest, model: str, fields: Mapping[str, Any]) -> ChatTurn:
    """What a request asks of the model.

    Args:
        context: Of the server.
        body: Of chat or generate.
        model: The server's name of its model.
        fields: Further fields of a chat completion.

    Raises:
        RequestError: naming the field at fault.
    """
    check_thinking(context, body)
    values = {
        "model": model,
        "chat_template_kwargs": body.template_kwargs(),
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs if body.logprobs else None,
        **body.common_fields(),
        **fields,
    }
    given = {name: value for name, value in values.items() if value is not None}
    return dataclasses.replace(chat_turn(context, check_fields(given, ChatCompletionRequest)), fills_context=True)


def check_thinking(context: ServerContext, body: OllamaRequest) -> None:
    """Raises RequestError where thinking is asked of a model that is not known to think."""
    if body.think and context.llm.renderer.chat_format.reasoning is None:
        name = body.model or context.model_names[0]
        raise RequestError(f"{name} does not support thinking", param="think", code="unsupported")


def pieces(choice: TurnChoice, events: list[OutputEvent]) -> tuple[str, str, list[dict[str, Any]]]:
    """Text, thinking and whole calls among the events of one step. A call that was cut short is left out, so that
    nobody runs it."""
    text = "".join(event.text for event in events if isinstance(event, ContentDelta))
    thinking = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    ended = [event.index for event in events if isinstance(event, CallEnd) and event.complete]
    parsed = choice.message().calls if ended else []
    return text, thinking, [_call(choice, index, parsed[index]) for index in ended]


def _call(choice: TurnChoice, index: int, call: ParsedCall) -> dict[str, Any]:
    arguments = msgspec.json.decode(call.arguments or "{}")
    function = {"index": index, "name": call.name, "arguments": arguments}
    return {"id": choice.call_id(index, call.id), "function": function}


class _ChatAnswer:
    """What all lines of one answer have in common."""

    def __init__(self, model: str) -> None:
        self.model = model

    def loaded(self) -> OllamaAnswer:
        """To a request without messages."""
        return self._line(OllamaMessage(), is_done=True, reason="load")

    def whole(self, running: RunningTurn, output: RequestOutput) -> OllamaAnswer:
        raise_failed(output)
        answer = self._piece(running.choices[0], output.outputs[0])
        self._end(answer, running.choices[0], output)
        return answer

    async def lines(self, running: RunningTurn, first: RequestOutput) -> AsyncGenerator[bytes, None]:
        """A line for each step that has something to tell, then one with what it cost."""
        choice = running.choices[0]
        async with contextlib.aclosing(after(first, running.outputs)) as outputs:
            async for output in outputs:
                raise_failed(output)
                answer = self._piece(choice, output.outputs[0])
                if _tells(answer):
                    yield line(answer)
                if output.finished:
                    last = self._line(OllamaMessage(), is_done=False)
                    self._end(last, choice, output)
                    yield line(last)

    def _piece(self, choice: TurnChoice, output: CompletionOutput) -> OllamaAnswer:
        text, thinking, calls = pieces(choice, choice.take(output))
        answer = self._line(OllamaMessage(content=text, thinking=thinking or UNSET, tool_calls=calls or UNSET))
        answer.logprobs = logprobs_of(output) or UNSET
        return answer

    def _end(self, answer: OllamaAnswer, choice: TurnChoice, output: RequestOutput) -> None:
        answer.done, answer.done_reason = True, done_reason(choice.finish_reason(output.outputs[0]))
        answer.add_times(Times.of(output))

    def _line(self, message: OllamaMessage, *, is_done: bool = False, reason: str | None = None) -> OllamaAnswer:
        return OllamaAnswer(
            model=self.model, created_at=now(), message=message, done=is_done, done_reason=reason or UNSET
        )


def _tells(answer: OllamaAnswer) -> bool:
    message = answer.message
    assert isinstance(message, OllamaMessage)
    return bool(message.content or message.thinking or message.tool_calls or answer.logprobs)
