"""Token ids to the chat route's answer, whole or chunk by chunk: what derendering a chat is made of.

A body of events is read while it comes: the first event is the request, each other one a chunk as the generate route
streams it. What it says is told at once.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from quire.async_llm import make_detokenizer_factory
from quire_engine import CompletionOutput, RequestOutput
from quire_interfaces import FinishReason, RenderedPrompt, RequestError, SamplingParams
from quire_server.body import parse_body
from quire_server.chat import ChatAnswer, chat_turn
from quire_server.config import ServerConfig
from quire_server.context import ServerContext
from quire_server.errors import HTTPError, naming_fields
from quire_server.protocol import ChatCompletionRequest
from quire_server.streaming import EventStream
from quire_server.token_protocol import (
    DerenderChatStreamRequest,
    GenerateChunk,
    GenerateResponse,
    GenerateResponseChoice,
)
from quire_server.turn import ChatTurn, prepare_turn

__all__ = ["ChoiceText", "chat_answer", "derender_stream", "name_of"]

_END_OF_EVENT = re.compile(rb"\r?\n\r?\n")


class ChoiceText:
    """One completion's text, from its token ids as they come."""

    def __init__(self, context: ServerContext, prompt: RenderedPrompt, params: SamplingParams) -> None:
        self._vocab_size = context.llm.engine_info.vocab_size
        self._detokenizer = make_detokenizer_factory(context.llm.tokenizer)(prompt.token_ids, params)
        self._hidden = (
            set() if params.include_stop_str_in_output else {*context.llm.eos_token_ids, *params.stop_token_ids}
        )
        self._held: list[int] = []
        self.finished = False

    def take(self, choice: GenerateResponseChoice) -> CompletionOutput:
        """What a chunk adds, as the engine told it. Without a `finish_reason` more may come.

        Raises:
            RequestError: a token id is not in the vocabulary.
        """
        token_ids = choice.token_ids or []
        if token_ids and max(token_ids) >= self._vocab_size:
            raise RequestError(
                f"choices[{choice.index}].token_ids must be below {self._vocab_size}, got {max(token_ids)}",
                param="generate_response",
            )
        reason = None if choice.finish_reason is None else _reason(choice.finish_reason)
        shown = self._held + token_ids
        # An end token has no text if it was what ended the output, which may be said later.
        may_hide = reason in (None, FinishReason.STOP) and bool(shown) and shown[-1] in self._hidden
        self._held = shown[-1:] if may_hide else []
        text = self._detokenizer.add(shown[:-1] if may_hide else shown).text
        if reason is not None:
            text += self._detokenizer.finish().text
            self.finished = True
        return CompletionOutput(index=choice.index, text=text, token_ids=token_ids, finish_reason=reason)


def _reason(name: str) -> FinishReason:
    try:
        return FinishReason(name)
    except ValueError:  # of another engine
        return FinishReason.STOP


def name_of(kind: str, response: GenerateResponse) -> str:
    """The answer's id."""
    return response.request_id or f"{kind}-{secrets.token_hex(12)}"


async def chat_answer(
    context: ServerContext,
    response: GenerateResponse,
    model: str,
    asked: ChatCompletionRequest | None,
    num_choices: int | None,
    prompt_tokens: int | None,
) -> tuple[ChatAnswer, SamplingParams]:
    """What makes the answer from the engine's outputs, and the parameters by which these are read.

    Args:
        response: The output, or its first chunk.
        model: The name to answer with.
        asked: The chat request; None reads the output as text.
        num_choices: How many choices there are; None for as many as were asked for.
        prompt_tokens: Told in the usage; None counts the rendered prompt.

    Raises:
        RequestError: naming the field of the chat request.
    """
    chat = asked or ChatCompletionRequest(messages=[{"role": "user", "content": ""}])
    if num_choices is not None:
        chat.n = num_choices
    with naming_fields(chat.field_names()):
        turn = chat_turn(context, chat)
        if asked is None:
            turn = ChatTurn(messages=turn.messages, params=turn.params)
        prepared = await prepare_turn(context, turn)
    if asked is None:
        prepared.prompt.token_ids = []
        prepared.is_plain = True
    running = prepared.running(_nothing())
    name = name_of("chatcmpl", response)
    return ChatAnswer(name, int(time.time()), model, chat, running, context, prompt_tokens), prepared.params


async def _nothing() -> AsyncIterator[RequestOutput]:
    return
    yield


async def derender_stream(context: ServerContext, request: Request) -> Response:
    """Answer a body of events by the events of a chat completion."""
    events = _data_of_events(request, context.config)
    data = await anext(events, None)
    if data is None:
        raise RequestError("the body holds no event; the first one must be the request", param="body")
    await context.inspector.check(data)
    body = parse_body(data, DerenderChatStreamRequest)
    model = context.resolve_model(body.model)
    if body.chat_request is not None:
        body.chat_request.stream = True
    chunks = _chunks(events)
    first = await anext(chunks)
    answer, params = await chat_answer(context, first, model, body.chat_request, None, body.prompt_tokens)
    outputs = _outputs(context, answer.running.prompt, params, first, chunks)
    return await EventStream.begin(answer.events(await anext(outputs), outputs), watches=False)


async def _outputs(
    context: ServerContext,
    prompt: RenderedPrompt,
    params: SamplingParams,
    first: GenerateChunk,
    rest: AsyncIterator[GenerateChunk],
) -> AsyncGenerator[RequestOutput, None]:
    """The engine's outputs, made again from the chunks."""
    texts = [ChoiceText(context, prompt, params) for _ in range(params.n)]
    num_tokens = 0
    chunk: GenerateChunk | None = first
    while chunk is not None and not all(text.finished for text in texts):
        outputs = []
        for choice in chunk.choices:
            if not 0 <= choice.index < len(texts) or texts[choice.index].finished:
                raise RequestError(
                    f"a chunk has news of choice {choice.index}, which has ended or is none of the {len(texts)} that "
                    "chat_request.n asks for",
                    param="choices",
                )
            num_tokens += len(choice.token_ids or [])
            outputs.append(texts[choice.index].take(choice))
        yield RequestOutput(
            request_id="",
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            outputs=outputs,
            finished=all(text.finished for text in texts),
            num_generation_tokens=num_tokens,
        )
        chunk = await anext(rest, None)
    if not all(text.finished for text in texts):
        raise RequestError("the chunks ended before every choice had its finish_reason", param="choices")


async def _chunks(events: AsyncIterator[bytes]) -> AsyncGenerator[GenerateChunk, None]:
    """The chunks behind the request, at least one. An error that the generating machine tells goes on to the caller."""
    is_first = True
    async for data in events:
        if data == b"[DONE]":
            break
        chunk = parse_body(data, GenerateChunk)
        if chunk.error is not None:
            message = str(chunk.error.get("message") or "the request failed where it was generated")
            raise HTTPError(500, message, code="generation_failed")
        is_first = False
        yield chunk
    if is_first:
        raise RequestError("the body holds no chunk behind the request", param="choices")


async def _data_of_events(request: Request, config: ServerConfig) -> AsyncGenerator[bytes, None]:
    """The data of each event of the body.

    Raises:
        HTTPError: 413 above `max_body_bytes` in all; 408 when nothing comes for `body_timeout_s`.
    """
    parts, held, size = aiter(request.stream()), bytearray(), 0
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
        begin = max(0, len(held) - 3)  # before it no end begins: nothing is searched twice, however small the parts
        held += part
        while end := _END_OF_EVENT.search(held, begin):
            event, begin = bytes(held[: end.start()]), 0
            del held[: end.end()]
            if data := _data(event):
                yield data
    if data := _data(bytes(held)):
        yield data


def _data(event: bytes) -> bytes:
    """Comments and other fields say nothing here."""
    lines = [line.removeprefix(b"data:").strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)
