"""Token ids to the answer of the chat or completions route, piece by piece: the routes of derendering.

A whole output is derendered in one piece (`derender.py`). A stream comes in one of two ways. As a body of events, which
is read while it comes: the first event is the request, each other one a chunk as the generate route streams it, and
what it says is told at once. Or as vLLM has it, a request per chunk: nothing is kept here, the client brings what was
before as `stream_state`, and all of it is read again.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TypeVar

import msgspec
from msgspec import UNSET
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from quire_engine import CompletionOutput, RequestOutput
from quire_interfaces import RequestError, SamplingParams
from quire_server.body import parse_checked, read_body
from quire_server.config import ServerConfig
from quire_server.content_encoding import encoding_of
from quire_server.context import ServerContext, in_thread_when
from quire_server.derender import (
    chat_answer,
    completion_answer,
    derender_chat,
    derender_completion,
    prompt_length,
)
from quire_server.derender_outputs import ChoiceOutputs, check_ids, check_response, request_output
from quire_server.errors import HTTPError
from quire_server.protocol import Body
from quire_server.responses import ChatChunk, Completion, json_response
from quire_server.streaming import EventStream
from quire_server.token_protocol import (
    DerenderChatContext,
    DerenderChatRequest,
    DerenderChatStreamRequest,
    DerenderCompletionContext,
    DerenderCompletionRequest,
    DerenderCompletionStreamRequest,
    DerenderStreamState,
    GenerateChunk,
    GenerateResponseChoice,
)

__all__ = [
    "DerenderedChatChunk",
    "DerenderedCompletionChunk",
    "derender_chat_completions",
    "derender_completions",
]

LONG_STATE_TOKENS = 1000
"""Where more tokens must be read again for a chunk, a worker thread does it."""

MAX_EVENT_LINES = 1000
"""Of one event in a body of events."""

_END_OF_EVENT = re.compile(rb"\r?\n\r?\n")
Context = TypeVar("Context", bound=Body)


class StreamState(msgspec.Struct, kw_only=True):
    """What the next chunk of a choice must bring with it."""

    output_token_ids: list[int]
    output_chunk_lens: list[int]
    role_sent: bool


class DerenderedChatChunk(msgspec.Struct):
    chunk: ChatChunk
    stream_state: StreamState


class DerenderedCompletionChunk(msgspec.Struct):
    chunk: Completion
    stream_state: StreamState


class _StreamField(Body):
    """Which of the two bodies it is."""

    stream: bool | None = None


async def derender_chat_completions(context: ServerContext, request: Request) -> Response:
    """POST /v1/chat/completions/derender: what was generated to the chat route's answer.

    A body of events is answered by events; a chunk (`stream`) by a chunk and the state for the next one.
    """
    if _is_events(request):
        return await _chat_events(context, request)
    data = await read_body(request, context.config)
    if (await parse_checked(context, data, _StreamField)).stream:
        return await _chat_chunk(context, await parse_checked(context, data, DerenderChatStreamRequest), request)
    return await derender_chat(context, await parse_checked(context, data, DerenderChatRequest), request)


async def derender_completions(context: ServerContext, request: Request) -> Response:
    """POST /v1/completions/derender: what was generated to the completions route's answer.

    A body of events is answered by events; a chunk (`stream`) by a chunk and the state for the next one.
    """
    if _is_events(request):
        return await _completion_events(context, request)
    data = await read_body(request, context.config)
    if (await parse_checked(context, data, _StreamField)).stream:
        body = await parse_checked(context, data, DerenderCompletionStreamRequest)
        return await _completion_chunk(context, body, request)
    return await derender_completion(context, await parse_checked(context, data, DerenderCompletionRequest), request)


def _is_events(request: Request) -> bool:
    return request.headers.get("content-type", "").split(";")[0].strip().lower() == "text/event-stream"


async def _chat_chunk(context: ServerContext, body: DerenderChatStreamRequest, request: Request) -> Response:
    chunk, state = body.generate_chunk, body.stream_state or DerenderStreamState()
    index = await in_thread_when(body.is_large, lambda: _check_chunk(context, chunk, state))
    if body.chat_request is not None:
        body.chat_request.stream = True
    answer, params = await chat_answer(context, request, body, chunk, index + 1)
    prompt = answer.running.prompt.token_ids
    output = await _replayed(context, prompt, params, chunk, state, answer.pass_over)
    parsed = answer.chunk(output, has_usage=chunk.usage is not None)
    if parsed.choices and not state.role_sent:
        parsed.choices[0].delta.role = "assistant"
        parsed.warnings = answer.running.turn.warnings or UNSET
        if answer.body.return_token_ids:
            parsed.prompt_token_ids = prompt
    return json_response(DerenderedChatChunk(parsed, _next_state(state, chunk)))


async def _completion_chunk(
    context: ServerContext, body: DerenderCompletionStreamRequest, request: Request
) -> Response:
    chunk, state = body.generate_chunk, body.stream_state or DerenderStreamState()
    index = await in_thread_when(body.is_large, lambda: _check_chunk(context, chunk, state))
    check_ids(context, body.prompt_token_ids or [], "prompt_token_ids")
    answer = await completion_answer(context, request, body.model, body.completion_request, chunk, 1, index + 1)
    rendered = answer.prompts[0].token_ids
    answer.prompt_tokens = prompt_length(body.prompt_tokens, len(rendered), chunk)
    prompt = rendered or body.prompt_token_ids or chunk.prompt_token_ids or []
    output = await _replayed(context, prompt, answer.params, chunk, state, lambda old: None)
    parsed = answer.chunk(output, is_first=not state.role_sent, has_usage=chunk.usage is not None)
    return json_response(DerenderedCompletionChunk(parsed, _next_state(state, chunk)))


def _check_chunk(context: ServerContext, chunk: GenerateChunk, state: DerenderStreamState) -> int:
    """The choice that the chunk is of.

    Raises:
        RequestError: naming the field that cannot be.
    """
    _check_no_error(chunk, "generate_chunk.error")
    if len(chunk.choices) > 1:
        raise RequestError(
            f"generate_chunk.choices must hold at most one choice, whose state comes with it, got "
            f"{len(chunk.choices)}; send them one by one",
            param="generate_chunk.choices",
        )
    check_response(context, chunk, "generate_chunk.")
    known_ids, lengths = state.output_token_ids, state.output_chunk_lens
    check_ids(context, known_ids, "stream_state.output_token_ids")
    if sum(lengths) != len(known_ids):
        raise RequestError(
            f"stream_state.output_chunk_lens adds up to {sum(lengths)}, but output_token_ids holds {len(known_ids)} "
            "tokens; send the stream_state of the chunk before as it came",
            param="stream_state.output_chunk_lens",
        )
    num_tokens = len(known_ids) + sum(len(choice.token_ids or []) for choice in chunk.choices)
    longest = context.llm.engine.info.max_model_len
    if num_tokens > longest:
        raise RequestError(
            f"stream_state.output_token_ids and the chunk hold {num_tokens} tokens, but this model's context is "
            f"{longest} tokens",
            param="stream_state.output_token_ids",
        )
    return chunk.choices[0].index if chunk.choices else 0


async def _replayed(
    context: ServerContext,
    prompt_token_ids: list[int],
    params: SamplingParams,
    chunk: GenerateChunk,
    state: DerenderStreamState,
    take: Callable[[CompletionOutput], object],
) -> RequestOutput:
    """The engine's output of this chunk; `take` gets those of the chunks before it."""
    index = chunk.choices[0].index if chunk.choices else 0

    def replay() -> list[CompletionOutput]:
        choice, start = ChoiceOutputs(context, prompt_token_ids, params), 0
        for length in state.output_chunk_lens:
            token_ids = state.output_token_ids[start : start + length]
            take(choice.take(GenerateResponseChoice.model_construct(index=index, token_ids=token_ids)))
            start += length
        return [choice.take(each) for each in chunk.choices]

    is_long = len(state.output_token_ids) > LONG_STATE_TOKENS
    outputs = await asyncio.to_thread(replay) if is_long else replay()
    num_tokens = len(state.output_token_ids) + sum(len(each.token_ids) for each in outputs)
    return request_output(context, chunk, outputs, num_tokens=num_tokens)


def _next_state(state: DerenderStreamState, chunk: GenerateChunk) -> StreamState:
    new = [token_id for choice in chunk.choices for token_id in choice.token_ids or []]
    return StreamState(
        output_token_ids=state.output_token_ids + new,
        output_chunk_lens=state.output_chunk_lens + ([len(new)] if new else []),
        role_sent=state.role_sent or bool(chunk.choices),
    )


async def _chat_events(context: ServerContext, request: Request) -> Response:
    """Answer a body of events by the events of a chat completion."""
    body, chunks = await _begin(context, request, DerenderChatContext)
    if body.chat_request is not None:
        body.chat_request.stream = True
    first = await anext(chunks)
    answer, params = await chat_answer(context, request, body, first, None)
    prompt, wants_usage = answer.running.prompt.token_ids, context.usage_wanted(answer.body.stream_options)[0]
    outputs = _outputs(context, prompt, params, first, chunks, reads_usage=wants_usage)
    return await EventStream.begin(answer.events(await anext(outputs), outputs), watches=False)


async def _completion_events(context: ServerContext, request: Request) -> Response:
    """Answer a body of events, which are of one prompt, by the events of a completion."""
    body, chunks = await _begin(context, request, DerenderCompletionContext)
    if body.completion_request is not None:
        body.completion_request.stream = True
    check_ids(context, body.prompt_token_ids or [], "prompt_token_ids")
    first = await anext(chunks)
    answer = await completion_answer(context, request, body.model, body.completion_request, first, 1, None)
    rendered = answer.prompts[0].token_ids
    answer.prompt_tokens = prompt_length(body.prompt_tokens, len(rendered), first)
    prompt = rendered or body.prompt_token_ids or first.prompt_token_ids or []
    wants_usage = context.usage_wanted(answer.body.stream_options)[0]
    outputs = _numbered(_outputs(context, prompt, answer.params, first, chunks, reads_usage=wants_usage))
    return await EventStream.begin(answer.events(await anext(outputs), outputs), watches=False)


async def _numbered(outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The outputs as those of the first prompt."""
    async for output in outputs:
        yield 0, output


async def _begin(
    context: ServerContext, request: Request, model: type[Context]
) -> tuple[Context, AsyncGenerator[GenerateChunk, None]]:
    """The first event, and the chunks behind it."""
    events = _data_of_events(request, context.config)
    data = await anext(events, None)
    if data is None:
        raise RequestError("the body holds no event; the first one must be the request", param="body")
    return await parse_checked(context, data, model), _chunks(context, events)


async def _outputs(
    context: ServerContext,
    prompt_token_ids: list[int],
    params: SamplingParams,
    first: GenerateChunk,
    rest: AsyncIterator[GenerateChunk],
    *,
    reads_usage: bool,
) -> AsyncGenerator[RequestOutput, None]:
    """The engine's outputs, made again from the chunks; the last one may hold only what was counted."""
    choices = [ChoiceOutputs(context, prompt_token_ids, params) for _ in range(params.n)]
    num_tokens = 0
    chunk: GenerateChunk | None = first
    while chunk is not None and not all(choice.finished for choice in choices):
        for place, choice in enumerate(chunk.choices):
            if choice.index >= len(choices) or choices[choice.index].finished:
                raise RequestError(
                    f"a chunk has news of choice {choice.index}, which has ended or is none of the {len(choices)} "
                    "that n asks for",
                    param=f"choices[{place}].index",
                )
            num_tokens += len(choice.token_ids or [])
        outputs = [choices[choice.index].take(choice) for choice in chunk.choices]
        output = request_output(context, chunk, outputs, num_tokens=num_tokens)
        output.finished = all(choice.finished for choice in choices)
        yield output
        if output.finished and not reads_usage:
            return
        chunk = await anext(rest, None)
    if not all(choice.finished for choice in choices):
        raise RequestError("the chunks ended before every choice had its finish_reason", param="choices")
    if chunk is not None and chunk.usage is not None:
        yield request_output(context, chunk, [], num_tokens=num_tokens)


async def _chunks(context: ServerContext, events: AsyncIterator[bytes]) -> AsyncGenerator[GenerateChunk, None]:
    """The chunks behind the request, at least one. An error that the generating machine tells goes on to the caller."""
    is_first = True
    async for data in events:
        if data == b"[DONE]":
            break
        chunk = await parse_checked(context, data, GenerateChunk)
        _check_no_error(chunk, "error")
        check_response(context, chunk, "")
        is_first = False
        yield chunk
    if is_first:
        raise RequestError("the body holds no chunk behind the request", param="choices")


def _check_no_error(chunk: GenerateChunk, at: str) -> None:
    if chunk.error is not None:
        reason = str(chunk.error.get("message") or "it says no more")[:1000]
        raise RequestError(f"the request failed where it was generated: {reason}", param=at, code="generation_failed")


async def _data_of_events(request: Request, config: ServerConfig) -> AsyncGenerator[bytes, None]:
    """The data of each event of the body.

    Raises:
        HTTPError: 413 above `max_body_bytes` in all; 408 when nothing comes for `body_timeout_s`.
    """
    if encoding_of(request.headers.getlist("content-encoding")) is not None:
        raise HTTPError(415, "a body of events must not be compressed", code="unsupported_media_type")
    parts, pending, size = aiter(request.stream()), bytearray(), 0
    while True:
        try:
            async with asyncio.timeout(config.body_timeout_s):
                part = await anext(parts, None)
        except TimeoutError:
            message = f"nothing of the request body arrived for {config.body_timeout_s:g} s (--body-timeout-s)"
            raise HTTPError(408, message, code="timeout") from None
        except ClientDisconnect:
            raise HTTPError(499, "the client closed the connection") from None
        if part is None:
            break
        size += len(part)
        if size > config.max_body_bytes:
            message = f"the request body is larger than {config.max_body_bytes} bytes (--max-body-bytes)"
            raise HTTPError(413, message, code="body_too_large")
        begin = max(0, len(pending) - 3)  # before it no end begins: nothing is searched twice, however small the parts
        pending += part
        while end := _END_OF_EVENT.search(pending, begin):
            event, begin = bytes(pending[: end.start()]), 0
            del pending[: end.end()]
            if data := _data(event):
                yield data
    if data := _data(bytes(pending)):
        yield data


def _data(event: bytes) -> bytes:
    """Comments and other fields say nothing here. Raises RequestError for an event of very many lines."""
    if event.count(b"\n") + event.count(b"\r") > MAX_EVENT_LINES:
        raise RequestError(f"an event of the body has more than {MAX_EVENT_LINES} lines", param="body")
    lines = [line.removeprefix(b"data:").strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)
