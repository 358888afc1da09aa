"""POST /inference/v1/generate and /inference/v1/abort_requests: token ids in, token ids out, in vLLM's shapes.

A conversation can be rendered on one machine (`render.py`), run here, and its output parsed on a third (`derender.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire_engine import CompletionOutput, HubClient, Logprob, RequestOutput
from quire_interfaces import OutputKind, PromptMedia, RenderedPrompt, RequestError, RequestOptions, SamplingParams
from quire_renderers import ChatFormat, OutputParser
from quire_server.administration import ADMIN_PATHS
from quire_server.answer_phases import AnswerPlan, phased_answer
from quire_server.body import read_model
from quire_server.context import ServerContext, in_thread_when, unless_disconnected
from quire_server.errors import naming_fields
from quire_server.logprobs import LOWEST, chat_logprobs, id_as_text, prompt_logprobs
from quire_server.media import hold_rendered, place_rendered, released_after
from quire_server.protocol import check_thinking_budget, transfer_args
from quire_server.request_ids import answer_id
from quire_server.responses import ChatLogprobs, Usage, sse
from quire_server.routed_experts import experts_text
from quire_server.streaming import EventStream, after
from quire_server.token_protocol import (
    AbortRequest,
    GenerateRequest,
    ThinkingBounds,
    sampling_field_names,
    sampling_params_from,
)
from quire_server.tool_choice import check_tools
from quire_server.turn import raise_failed

__all__ = ["TOKEN_PATHS", "GeneratedText", "GeneratedTokens", "abort_requests", "abortable", "generate"]


TOKEN_PATHS = ADMIN_PATHS | {
    "/inference/v1/generate", "/inference/v1/abort_requests", "/health", "/ping", "/ready", "/version", "/load",
    "/v1/models", "/v1/models/{name:path}", "/v1/usage", "/metrics", "/sleep", "/wake_up", "/is_sleeping",
    "/kv_event_sources", "/v1/engine/events", "/v1/requests", "/v1/requests/{id:path}/explain",
}  # fmt: skip
"""Routes of --tokens-only: tokens in and out, and what operators need."""


class TokenLogprob(msgspec.Struct):
    """A token, its log probability, and its place among all tokens by likelihood (1 is the most likely), where it is
    known. `token` is the id, too, as "token_id:262": no text is made on this route."""

    token_id: int
    logprob: float
    rank: int | None
    token: str
    bytes: None = None


class OutputTokenLogprob(TokenLogprob, kw_only=True):
    top_logprobs: list[TokenLogprob]
    """The most likely tokens at its place; where none were asked for, the token itself."""


class TokenLogprobs(msgspec.Struct):
    """Log probabilities of one choice, one entry per token."""

    content: list[OutputTokenLogprob]


class _ChoiceBase(msgspec.Struct, kw_only=True):
    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    routed_experts: str | None = None
    """With the end, where the engine returns them (`experts_text`)."""


class TokensChoice(_ChoiceBase, kw_only=True):
    logprobs: TokenLogprobs | None = None


class TextChoice(_ChoiceBase, kw_only=True):
    text: str
    logprobs: ChatLogprobs | None = None


class _GeneratedBase(msgspec.Struct, kw_only=True):
    request_id: str
    model: str
    created: int
    usage: Usage | None = None
    prompt_logprobs: list[Any] | None = None
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    """Where the keys and values are held, for the engine that goes on; with the end."""
    ec_transfer_params: None = None


class GeneratedTokens(_GeneratedBase, kw_only=True):
    """Whole response and streaming chunk have the same form."""

    output_mode: str = "tokens"
    choices: list[TokensChoice]


class GeneratedText(_GeneratedBase, kw_only=True):
    """Whole response and streaming chunk where text was asked for."""

    output_mode: str = "text"
    choices: list[TextChoice]


async def generate(context: ServerContext, request: Request) -> Response:
    """POST /inference/v1/generate."""
    body = await read_model(context, request, GenerateRequest)
    body.check_supported()
    answer = _Answer(answer_id(request, "", body.request_id), context.resolve_model(body.model), body)
    items = [] if body.features is None else body.features.items()
    held = await hold_rendered(context, items)
    try:
        media = None if held is None else place_rendered(held, items, body.token_ids)
        outputs = await in_thread_when(body.is_large, lambda: _begun(context, answer.id, body, media))
    except BaseException:
        if held is not None:
            held.release()
        raise
    if held is not None:
        outputs = released_after(outputs, held)
    with naming_fields(sampling_field_names()):
        first = await unless_disconnected(request, anext(outputs))
        raise_failed(first)
    if not body.stream:
        return Response(msgspec.json.encode(answer.of(first, has_usage=True)), media_type="application/json")
    return await EventStream.begin(answer.events(first, outputs, *context.usage_wanted(body.stream_options)))


def _begun(
    context: ServerContext, name: str, body: GenerateRequest, media: PromptMedia | None
) -> AsyncGenerator[RequestOutput, None]:
    """The outputs, once everything was checked. Raises RequestError naming the field at fault."""
    params = sampling_params_from(body.sampling_params)
    if body.kv_transfer_params:
        params = dataclasses.replace(params, extra_args=transfer_args(body.kv_transfer_params, params.extra_args))
    if body.thinking is not None:
        params = dataclasses.replace(params, detokenize=True)  # the text tells when it thinks
    elif body.output_mode == "tokens" and not params.stop:
        params = dataclasses.replace(params, detokenize=False)
    with naming_fields(sampling_field_names()):
        context.check_request(params, body.priority)
        return _outputs(context, name, body, params, media)


def _outputs(
    context: ServerContext,
    name: str,
    body: GenerateRequest,
    params: SamplingParams,
    media: PromptMedia | None,
) -> AsyncGenerator[RequestOutput, None]:
    """Check the request now, run it when iterated."""

    def run(
        prompt: RenderedPrompt, params: SamplingParams, options: RequestOptions
    ) -> AsyncGenerator[RequestOutput, None]:
        engine_id = f"{name}/{secrets.token_hex(8)}"
        outputs = context.llm.engine.generate(prompt, params, options, request_id=engine_id)
        return abortable(context, name, engine_id, outputs)

    prompt = RenderedPrompt(token_ids=body.token_ids, media=media)
    bounds, options = body.thinking, context.request_options(body)
    if bounds is None:
        return run(prompt, params, options)
    phase_options = dataclasses.replace(options, output_kind=OutputKind.DELTA)
    form = context.llm.renderer.chat_format
    plan = AnswerPlan(
        form=form,
        max_model_len=context.llm.engine.info.max_model_len,
        budget=bounds.budget,
        forced=bounds.forced,
        thinks=bounds.thinks,
    )
    return phased_answer(
        lambda prompt, params: run(prompt, params, phase_options),
        _thinking_parsers(form, bounds),
        context.llm.renderer.tokenizer,
        prompt,
        params,
        plan=plan,
        kind=options.output_kind or OutputKind.FINAL_ONLY,
    )


async def abortable(
    context: ServerContext, name: str, engine_id: str, outputs: AsyncGenerator[RequestOutput, None]
) -> AsyncGenerator[RequestOutput, None]:
    """The outputs, while which `abort_requests` knows the request.

    Args:
        context: Of the server.
        name: The client's for the request.
        engine_id: The engine's.
        outputs: Of the engine.
    """
    key = (context.caller.owner, name)
    running = context.generating.setdefault(key, set())
    running.add(engine_id)
    try:
        async with contextlib.aclosing(outputs) as source:
            async for output in source:
                yield output
    finally:
        running.discard(engine_id)
        if not running and context.generating.get(key) is running:
            del context.generating[key]


async def abort_requests(context: ServerContext, request: Request) -> Response:
    """POST /inference/v1/abort_requests: end what /inference/v1/generate runs under these ids, as `finish_reason`
    "abort". Ids that nothing of the caller's runs under are ignored."""
    body = await read_model(context, request, AbortRequest)
    names = [body.request_ids] if isinstance(body.request_ids, str) else body.request_ids
    abort_here(context, context.caller.owner, names)
    if isinstance(context.llm.client, HubClient):
        context.llm.client.tell_others("abort_requests", context.caller.owner, names)
    return Response()


def abort_here(context: ServerContext, owner: str, names: Sequence[str]) -> None:
    """End what this process runs for an owner under these ids."""
    context.llm.engine.abort([engine_id for name in names for engine_id in context.generating.get((owner, name), ())])


def _thinking_parsers(form: ChatFormat, bounds: ThinkingBounds) -> Callable[[], OutputParser]:
    """Makes parsers as the machine that rendered the request has them."""
    check_thinking_budget(bounds.budget, "thinking.budget")
    if bounds.budget is not None and form.thinking_end() is None:
        raise RequestError(
            "thinking: this server knows no way to close the thinking of its model; start it with --reasoning-parser "
            "as where the request was rendered, or leave thinking out",
            param="thinking",
            code="unsupported",
        )
    try:
        check_tools(bounds.tools or ())
    except RequestError as error:
        error.param = f"thinking.{error.param}"
        raise
    return lambda: form.parser(
        bounds.tools,
        continued=(form.thinking_start() or "") if bounds.is_open else "",
        skip_special_tokens=bounds.skip_special_tokens,
    )


class _Answer:
    """What all pieces of one answer have in common."""

    def __init__(self, name: str, model: str, body: GenerateRequest) -> None:
        self.id = name
        self._model = model
        self._body = body
        self._created = int(time.time())

    async def events(
        self, first: RequestOutput, rest: AsyncGenerator[RequestOutput, None], wants_usage: bool, continuous: bool
    ) -> AsyncGenerator[bytes, None]:
        last = first
        prompt = self._body.token_ids if self._body.return_token_ids else None
        async with contextlib.aclosing(after(first, rest)) as outputs:
            async for output in outputs:
                raise_failed(output)
                chunk = self.of(output, has_usage=continuous)
                chunk.prompt_token_ids, prompt = prompt, None
                yield sse(chunk)
                last = output
        if wants_usage:
            yield sse(self._generated([], self._usage(last)))

    def of(self, output: RequestOutput, *, has_usage: bool) -> GeneratedTokens | GeneratedText:
        """An output as it is told."""
        answer = self._generated(output.outputs, None)
        answer.kv_transfer_params = output.kv_transfer_params
        if has_usage:
            answer.usage = self._usage(output)
        if output.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        if self._body.return_token_ids:
            answer.prompt_token_ids = self._body.token_ids
        return answer

    def _generated(self, outputs: Sequence[CompletionOutput], usage: Usage | None) -> GeneratedTokens | GeneratedText:
        name, model, created = self.id, self._model, self._created
        if self._body.output_mode == "text":
            texts = [TextChoice(**_fields(each), text=each.text, logprobs=chat_logprobs(each)) for each in outputs]
            return GeneratedText(request_id=name, model=model, created=created, choices=texts, usage=usage)
        choices = [TokensChoice(**_fields(each), logprobs=_token_logprobs(each)) for each in outputs]
        return GeneratedTokens(request_id=name, model=model, created=created, choices=choices, usage=usage)

    def _usage(self, output: RequestOutput) -> Usage:
        return Usage.of(len(self._body.token_ids), output.num_generation_tokens, output.num_cached_tokens)


def _fields(output: CompletionOutput) -> dict[str, Any]:
    return {
        "index": output.index,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "routed_experts": experts_text(output) or None,
    }


def _token_logprobs(output: CompletionOutput) -> TokenLogprobs | None:
    if output.logprobs is None:
        return None
    return TokenLogprobs(
        [
            OutputTokenLogprob(*_entry(chosen), top_logprobs=[TokenLogprob(*_entry(each)) for each in top or [chosen]])
            for chosen, *top in output.logprobs
        ]
    )


def _entry(token: Logprob) -> tuple[int, float, int | None, str]:
    return token.token_id, max(token.logprob, LOWEST), token.rank, id_as_text(token.token_id)
