"""POST /v1/chat/completions: messages in, an assistant's message out, whole or as a stream of events."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.prompts import naming_prompt
from quire_engine import CompletionOutput, RequestOutput
from quire_interfaces import RequestError
from quire_server.beams import beam_search_params
from quire_server.body import read_model
from quire_server.chat_history import readable_messages
from quire_server.chat_output import ChatDeltas, whole_message
from quire_server.context import ServerContext, all_of, in_thread_when, unless_disconnected
from quire_server.errors import naming_fields
from quire_server.functions import as_tool_messages, function_use, in_old_shape
from quire_server.logprobs import chat_logprobs, prompt_logprobs
from quire_server.protocol import ChatCompletionRequest
from quire_server.request_ids import answer_id
from quire_server.request_timings import request_timings
from quire_server.request_warnings import field_left_out
from quire_server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    Delta,
    Usage,
    json_response,
    sse,
)
from quire_server.routed_experts import experts_text
from quire_server.streaming import EventStream, after
from quire_server.token_protocol import BatchChatCompletionRequest
from quire_server.tool_choice import ToolUse, chat_client_tools, chat_tool_use
from quire_server.turn import ChatTurn, RunningTurn, TurnChoice, raise_failed, start_turn

__all__ = ["ChatAnswer", "batch_chat_completions", "chat_completions", "chat_turn"]


async def chat_completions(context: ServerContext, request: Request) -> Response:
    """Serve one request; errors of the tree become error bodies in the app."""
    body = await read_model(context, request, ChatCompletionRequest)
    model = context.resolve_model(body.model)
    with naming_fields(body.field_names()):
        running = await start_turn(context, lambda: chat_turn(context, body), is_large=body.is_large)
    name = answer_id(request, "chatcmpl-", body.request_id)
    answer = ChatAnswer(name, int(time.time()), model, body, running, context)
    # The first output comes before the status line, so that an early refusal still has its own status.
    with naming_fields(body.field_names()):
        first = await unless_disconnected(request, anext(running.outputs))
    if not body.stream:
        return Response(msgspec.json.encode(answer.whole(first)), media_type="application/json")
    return await EventStream.begin(answer.events(first, running.outputs))


async def batch_chat_completions(context: ServerContext, request: Request) -> Response:
    """POST /v1/chat/completions/batch: one choice per conversation, with its place as index."""
    body = await read_model(context, request, BatchChatCompletionRequest)
    model = context.resolve_model(body.model)
    most = context.config.max_prompts_per_request
    if len(body.messages) > most:
        raise RequestError(
            f"messages holds {len(body.messages)} conversations, this server takes {most} at most "
            "(--max-prompts-per-request)",
            param="messages",
        )
    name, created = answer_id(request, "chatcmpl-", body.request_id), int(time.time())
    answers = []
    with naming_fields(body.field_names()):
        for index, messages in enumerate(body.messages):  # all are checked before the first one runs
            one = body.model_copy(update={"messages": messages})
            with naming_prompt(index, len(body.messages), "messages"):
                make_turn = functools.partial(chat_turn, context, one)
                running = await start_turn(context, make_turn, is_large=body.is_large)
            answers.append(ChatAnswer(name, created, model, one, running, context))
        outputs = await unless_disconnected(request, all_of(anext(each.running.outputs) for each in answers))
    return await in_thread_when(body.is_large, lambda: json_response(_in_one(answers, outputs)))


def _in_one(answers: Sequence[ChatAnswer], outputs: Sequence[RequestOutput]) -> ChatCompletion:
    """The answers of a batch as the choices of one."""
    wholes = [answer.whole(output) for answer, output in zip(answers, outputs, strict=True)]
    first = wholes[0]
    first.choices = [whole.choices[0] for whole in wholes]
    for index, choice in enumerate(first.choices):
        choice.index = index
    first.usage = Usage.sum([whole.usage for whole in wholes])
    return first


def _tool_use(body: ChatCompletionRequest) -> ToolUse:
    """What the request says of tools, in either of the two spellings."""
    if body.functions is not None:
        use = function_use(body.functions, body.function_call)
    else:
        use = chat_tool_use(chat_client_tools(body.tools or ()), body.tool_choice, body.parallel_tool_calls)
    if body.web_search_options is not None:
        use.offered.warn(field_left_out("web_search_options", "this server does not search the web"))
    return use


def chat_turn(context: ServerContext, body: ChatCompletionRequest) -> ChatTurn:
    """What the request asks of the model.

    Raises:
        RequestError: naming the field at fault.
    """
    params = context.sampling_params(body)
    return ChatTurn(
        messages=readable_messages(as_tool_messages(body.messages), context.modalities),
        params=params,
        beams=beam_search_params(body, params),
        tool_use=_tool_use(body),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template=body.chat_template,
        chat_template_kwargs=context.template_kwargs(body.template_kwargs()),
        mm_processor_kwargs=body.mm_processor_kwargs,
        add_special_tokens=bool(body.add_special_tokens),
        include_reasoning=body.include_reasoning,
        thinking_token_budget=body.thinking_token_budget,
        options=context.request_options(body),
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
    )


@dataclass(slots=True)
class ChatAnswer:
    """What all pieces of one answer have in common."""

    id: str
    created: int
    model: str
    body: ChatCompletionRequest
    running: RunningTurn
    context: ServerContext
    prompt_tokens: int | None = None
    """The prompt's length where it is another one than that of the rendered prompt."""
    deltas: dict[int, ChatDeltas] = field(default_factory=dict)
    """Index of an answer -> what was told of it."""

    def whole(self, output: RequestOutput) -> ChatCompletion:
        raise_failed(output)
        completion = ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            deterministic=self.context.is_deterministic(self.running.turn.params, self.model),
            choices=[self._choice(each) for each in output.outputs],
            usage=self._usage(output),
            system_fingerprint=self.context.fingerprint,
            service_tier=self._service_tier,
            metadata=self.body.metadata,
            warnings=self.running.turn.warnings or UNSET,
            kv_transfer_params=output.kv_transfer_params,
        )
        if output.prompt_logprobs is not None:
            completion.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        if self.body.return_token_ids:
            completion.prompt_token_ids = self.running.prompt.token_ids
        if self.context.config.enable_per_request_metrics:
            completion.metrics = request_timings([output])
        return completion

    def _choice(self, output: CompletionOutput) -> ChatChoice:
        choice = self.running.choices[output.index]
        choice.take(output)
        message = whole_message(choice)
        message.role = self.context.config.response_role
        if echoed := self.body.echoed_text():
            message.content = echoed + (message.content or "")
        if self.body.functions is not None:
            in_old_shape(message)
        return ChatChoice(
            index=output.index,
            message=message,
            logprobs=chat_logprobs(output, as_ids=self.context.names_tokens_by_id(self.body)),
            finish_reason=self._finish_reason(choice, output),
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self.body.return_token_ids else None,
            routed_experts=experts_text(output),
        )

    def _deltas(self, index: int) -> ChatDeltas:
        return self.deltas.setdefault(index, ChatDeltas(self.running.choices[index]))

    def _finish_reason(self, choice: TurnChoice, output: CompletionOutput) -> str | None:
        reason = choice.finish_reason(output)
        return "function_call" if self.body.functions is not None and reason == "tool_calls" else reason

    @property
    def _service_tier(self) -> str | None:
        """There is one; requests that speak of tiers are told."""
        return None if self.body.service_tier is None else "default"

    def _usage(self, output: RequestOutput) -> Usage:
        reasoning = self.running.num_reasoning_tokens()
        prompt_tokens = len(self.running.prompt.token_ids) if self.prompt_tokens is None else max(0, self.prompt_tokens)
        return Usage.of(prompt_tokens, output.num_generation_tokens, output.num_cached_tokens, reasoning)

    async def events(
        self, first: RequestOutput, rest: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[bytes, None]:
        """One element per engine step that has something to tell; the role comes with the first."""
        wants_usage, continuous = self.context.usage_wanted(self.body.stream_options)
        opening = self._opening(first, continuous)
        last = first
        async with contextlib.aclosing(after(first, rest)) as outputs:
            async for output in outputs:
                raise_failed(output)
                choices = [self._chunk_choice(each) for each in output.outputs]
                usage = self._usage(output) if continuous else None
                telling = [each for each in choices if continuous or _tells(each)]
                chunks = [self._chunk([each], usage) for each in telling]
                if output.prompt_logprobs is not None and output is not first and chunks:
                    chunks[0].prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
                events = opening + b"".join(map(sse, chunks))
                if events:
                    yield events
                opening, last = b"", output
        if wants_usage:
            end = self._chunk([], self._usage(last))
            if self.context.config.enable_per_request_metrics:
                end.metrics = request_timings([last])
            yield sse(end)

    def pass_over(self, output: CompletionOutput) -> None:
        """Take in what was told before."""
        self._chunk_choice(output)

    def chunk(self, output: RequestOutput, *, has_usage: bool) -> ChatChunk:
        """One output as one chunk. What ends a stream, without choices, has the usage of all of it."""
        choices = [self._chunk_choice(each) for each in output.outputs]
        chunk = self._chunk(choices, self._usage(output) if has_usage else None)
        if output.prompt_logprobs is not None:
            chunk.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        return chunk

    def _opening(self, first: RequestOutput, continuous: bool) -> bytes:
        """The chunk with the role, and what is known before any token."""
        choices = [
            ChatChunkChoice(
                index=index,
                delta=Delta(role=self.context.config.response_role, content=self.body.echoed_text()),
                token_ids=[] if self.body.return_token_ids else None,
            )
            for index in range(self.body.n or 1)
        ]
        usage = self._usage(dataclasses.replace(first, num_generation_tokens=0)) if continuous else None
        chunk = self._chunk(choices, usage)
        chunk.warnings = self.running.turn.warnings or UNSET
        chunk.prompt_token_ids = self.running.prompt.token_ids if self.body.return_token_ids else None
        if first.prompt_logprobs is not None:
            chunk.prompt_logprobs = prompt_logprobs(first.prompt_logprobs)
        return sse(chunk)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatChunk:
        return ChatChunk(
            id=self.id,
            created=self.created,
            model=self.model,
            deterministic=self.context.is_deterministic(self.running.turn.params, self.model),
            choices=choices,
            usage=usage,
            system_fingerprint=self.context.fingerprint,
            service_tier=self._service_tier,
        )

    def _chunk_choice(self, output: CompletionOutput) -> ChatChunkChoice:
        choice = self.running.choices[output.index]
        delta = self._deltas(output.index).delta_of(choice.take(output))
        if self.body.functions is not None:
            in_old_shape(delta)
        return ChatChunkChoice(
            index=output.index,
            delta=delta,
            logprobs=chat_logprobs(output, as_ids=self.context.names_tokens_by_id(self.body)),
            finish_reason=self._finish_reason(choice, output) if output.finished else None,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self.body.return_token_ids else None,
            routed_experts=experts_text(output),
        )


def _tells(choice: ChatChunkChoice) -> bool:
    """Whether a chunk says anything: text may be held back that can still become a call."""
    delta = choice.delta
    has_text = any(
        part is not UNSET for part in (delta.content, delta.reasoning, delta.tool_calls, delta.function_call)
    )
    return has_text or choice.finish_reason is not None or bool(choice.logprobs) or choice.token_ids is not None
