"""POST /api/generate: a prompt to its continuation: through the chat template, as it is (`raw`), or with a gap
(`suffix`)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire_engine import CompletionOutput, RequestOutput
from quire_interfaces import RenderedPrompt
from quire_server.body import check_fields, read_model
from quire_server.completions import completion_params, render_prompts
from quire_server.context import ServerContext, in_thread_when, unless_disconnected
from quire_server.errors import naming_fields
from quire_server.ollama.answers import OllamaAnswer, Times, done_reason, line, lines, logprobs_of, now
from quire_server.ollama.chat import check_thinking, pieces, turn_of
from quire_server.ollama.conversation import image_parts
from quire_server.ollama.names import own_name
from quire_server.ollama.protocol import OllamaGenerateRequest, keep_alive_s
from quire_server.protocol import CompletionRequest
from quire_server.responses import json_response
from quire_server.streaming import after
from quire_server.tei_tokens import check_token_ids
from quire_server.turn import TurnChoice, prepare_turn, raise_failed, reaches_past, run_turn

__all__ = ["generate"]


async def generate(context: ServerContext, request: Request) -> Response:
    """POST /api/generate. Without a prompt the model is only asked to be there, which it is."""
    body = await read_model(context, request, OllamaGenerateRequest, any_content_type=True)
    keep_alive_s(body.keep_alive)
    model = context.resolve_model(own_name(context, body.model))
    body.check_supported()
    answer = _GeneratedText(body.model or model, body)
    if not (body.prompt or body.images or body.suffix):
        return json_response(answer.loaded())
    with naming_fields(body.field_names()):
        begin = _plain if body.raw or body.suffix else _templated
        outputs, choice = await begin(context, body, model)
        first = await unless_disconnected(request, anext(outputs))
    if not body.stream:
        return json_response(answer.whole(choice, first))
    return await lines(answer.lines(choice, first, outputs))


Begun = tuple[AsyncGenerator[RequestOutput, None], TurnChoice | None]
"""Outputs, and what tells thinking from text in them."""


async def _templated(context: ServerContext, body: OllamaGenerateRequest, model: str) -> Begun:
    """The prompt as a user's message, behind the tokens of `context`, if there are some."""
    content: Any = body.prompt
    if body.images:
        text = [{"type": "text", "text": body.prompt}] if body.prompt else []
        content = [*image_parts(body.images, "images"), *text]
    messages = [{"role": "user", "content": content}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    prepared = await prepare_turn(
        context, lambda: turn_of(context, body, model, {"messages": messages}), is_large=body.is_large
    )
    try:
        if body.context:
            check_token_ids(body.context, context.llm.engine.info.vocab_size, "context")
            prepared.prompt = _behind(context, body.context, prepared.prompt)
            if reaches_past(context, prepared.prompt, prepared.params):
                prepared.params = dataclasses.replace(prepared.params, max_tokens=None)
        running = run_turn(context, prepared)
    except BaseException:
        prepared.release_media()
        raise
    return running.outputs, running.choices[0]


def _behind(context: ServerContext, before: list[int], prompt: RenderedPrompt) -> RenderedPrompt:
    """The prompt behind what was said before, which has the token that begins a text already."""
    token_ids = prompt.token_ids
    opening = context.llm.renderer.tokenizer.encode("", add_special_tokens=True)[:1]
    if opening and token_ids[:1] == opening:
        token_ids = token_ids[1:]
    return dataclasses.replace(prompt, text=None, token_ids=[*before, *token_ids], num_reused_tokens=0)


async def _plain(context: ServerContext, body: OllamaGenerateRequest, model: str) -> Begun:
    """The prompt as it is, or what stands between it and the suffix."""
    check_thinking(context, body)
    values = {
        "model": model,
        "prompt": body.prompt,
        "suffix": body.suffix,
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        **body.common_fields(),
    }
    fields = check_fields(
        {name: value for name, value in values.items() if value is not None or name == "max_tokens"}, CompletionRequest
    )

    def begin() -> AsyncGenerator[RequestOutput, None]:
        params, _ = completion_params(context, fields)
        (prompt,) = render_prompts(context, fields, params)
        if reaches_past(context, prompt, params):
            params = dataclasses.replace(params, max_tokens=None)
        return context.llm.engine.generate(prompt, params, context.request_options(fields))

    return await in_thread_when(body.is_large, begin), None


class _GeneratedText:
    """What all lines of one answer have in common."""

    def __init__(self, model: str, body: OllamaGenerateRequest) -> None:
        self._model, self._body = model, body
        self._output_ids: list[int] = []

    def loaded(self) -> OllamaAnswer:
        """To a request without a prompt."""
        answer = self._line("")
        answer.done, answer.done_reason = True, "load"
        return answer

    def whole(self, choice: TurnChoice | None, output: RequestOutput) -> OllamaAnswer:
        raise_failed(output)
        answer = self._piece(choice, output.outputs[0])
        self._end(answer, output)
        return answer

    async def lines(
        self, choice: TurnChoice | None, first: RequestOutput, rest: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[bytes, None]:
        """A line for each step that has something to tell, then one with what it cost."""
        async with contextlib.aclosing(after(first, rest)) as outputs:
            async for output in outputs:
                raise_failed(output)
                answer = self._piece(choice, output.outputs[0])
                if answer.response or answer.thinking or answer.logprobs:
                    yield line(answer)
                if output.finished:
                    last = self._line("")
                    self._end(last, output)
                    yield line(last)

    def _piece(self, choice: TurnChoice | None, output: CompletionOutput) -> OllamaAnswer:
        self._output_ids += output.token_ids
        text, thinking = output.text, ""
        if choice is not None:
            text, thinking, _ = pieces(choice, choice.take(output))
        answer = self._line(text)
        answer.thinking = thinking or UNSET
        answer.logprobs = logprobs_of(output) or UNSET
        return answer

    def _end(self, answer: OllamaAnswer, output: RequestOutput) -> None:
        answer.done, answer.done_reason = True, done_reason(output.outputs[0].finish_reason)
        answer.add_times(Times.of(output))
        if not self._body.raw:
            answer.context = [*output.prompt_token_ids, *self._output_ids]

    def _line(self, text: str) -> OllamaAnswer:
        return OllamaAnswer(model=self._model, created_at=now(), response=text, done=False)
