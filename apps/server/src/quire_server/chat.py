"""POST /v1/chat/completions: messages in, an assistant's message out, whole or as a stream of events."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire import OutputKind, RequestOutput
from quire_engine import CompletionOutput
from quire_interfaces import FinishReason, RenderedPrompt, RequestError
from quire_server.body import parse_body, read_body
from quire_server.context import ServerContext, in_thread_when_long, unless_disconnected
from quire_server.errors import HTTPError, naming_fields
from quire_server.logprobs import chat_logprobs, prompt_logprobs
from quire_server.protocol import ChatCompletionRequest
from quire_server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatMessage,
    Delta,
    Usage,
    sse,
)
from quire_server.streaming import EventStream, after

__all__ = ["chat_completions", "raise_failed", "render_chat"]


async def chat_completions(context: ServerContext, request: Request) -> Response:
    """Serve one request; errors of the tree become error bodies in the app."""
    body = parse_body(await read_body(request, context.config), ChatCompletionRequest)
    model = context.resolve_model(body.model)
    with naming_fields(body.field_names()):
        params = context.sampling_params(body)
        prompt = await render_chat(context, body)
        outputs = context.llm.generate(
            prompt,
            params,
            priority=body.priority,
            cache_salt=body.cache_salt,
            kind=OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY,
        )
    answer = _Answer(f"chatcmpl-{body.request_id or secrets.token_hex(12)}", int(time.time()), model, body, prompt)
    if not body.stream:
        final = await unless_disconnected(request, anext(outputs))
        return Response(msgspec.json.encode(answer.whole(final)), media_type="application/json")
    # The first output comes before the status line, so that an early refusal still has its own status.
    first = await unless_disconnected(request, anext(outputs))
    return await EventStream.begin(answer.events(first, outputs))


async def render_chat(context: ServerContext, body: ChatCompletionRequest) -> RenderedPrompt:
    """The conversation as token ids.

    Raises:
        RequestError: naming the message or field at fault.
    """
    if body.chat_template is not None and not context.config.trust_request_chat_template:
        raise RequestError(
            "this server does not take chat templates from requests; start it with --trust-request-chat-template",
            param="chat_template",
        )
    num_chars = sum(len(str(message.get("content") or "")) for message in body.messages)
    tools = body.tools if body.tool_choice != "none" else None

    def render() -> RenderedPrompt:
        return context.llm.renderer.render_chat(
            body.messages,
            tools=tools or None,
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            chat_template=body.chat_template,
            chat_template_kwargs=body.chat_template_kwargs,
            add_special_tokens=bool(body.add_special_tokens),
        )

    return await in_thread_when_long(num_chars, render)


def raise_failed(output: RequestOutput) -> None:
    """Raise when the engine could not compute the request."""
    for completion in output.outputs:
        if completion.finish_reason is FinishReason.ERROR:
            raise HTTPError(500, completion.error or "the request failed in the engine", code="generation_failed")


@dataclass(slots=True)
class _Answer:
    """What all pieces of one answer have in common."""

    id: str
    created: int
    model: str
    body: ChatCompletionRequest
    prompt: RenderedPrompt

    def whole(self, output: RequestOutput) -> ChatCompletion:
        raise_failed(output)
        completion = ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[self._choice(each) for each in output.outputs],
            usage=self._usage(output),
        )
        if output.prompt_logprobs is not None:
            completion.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        if self.body.return_token_ids:
            completion.prompt_token_ids = self.prompt.token_ids
        return completion

    def _choice(self, output: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            index=output.index,
            message=ChatMessage(content=output.text),
            logprobs=chat_logprobs(output),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self.body.return_token_ids else UNSET,
        )

    def _usage(self, output: RequestOutput) -> Usage:
        return Usage.of(len(self.prompt.token_ids), output.num_generation_tokens, output.num_cached_tokens)

    async def events(self, first: RequestOutput, rest: AsyncIterator[RequestOutput]) -> AsyncGenerator[bytes, None]:
        """One element per engine step; the role comes with the first."""
        options = self.body.stream_options
        continuous = options is not None and options.include_usage and options.continuous_usage_stats
        opening = self._opening()
        last = first
        async with contextlib.aclosing(after(first, rest)) as outputs:
            async for output in outputs:
                raise_failed(output)
                usage = self._usage(output) if continuous else UNSET
                events = b"".join([sse(self._chunk([self._chunk_choice(each)], usage)) for each in output.outputs])
                yield opening + events
                opening, last = b"", output
        if options is not None and options.include_usage:
            yield sse(self._chunk([], self._usage(last)))

    def _opening(self) -> bytes:
        choices = [
            ChatChunkChoice(index=index, delta=Delta(role="assistant", content="")) for index in range(self.body.n or 1)
        ]
        chunk = self._chunk(choices, UNSET)
        if self.body.return_token_ids:
            chunk.prompt_token_ids = self.prompt.token_ids
        return sse(chunk)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | msgspec.UnsetType) -> ChatChunk:
        return ChatChunk(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)

    def _chunk_choice(self, output: CompletionOutput) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=output.index,
            delta=Delta(content=output.text),
            logprobs=chat_logprobs(output),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason if output.finish_reason is not None else UNSET,
            token_ids=output.token_ids if self.body.return_token_ids else UNSET,
        )
