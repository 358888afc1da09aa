"""Tokens in, tokens out: /inference/v1/generate, and the render and derender routes around it.

A conversation can be rendered on one machine, run on another, and its output parsed on a third. What comes out is what
the chat and completion routes would have answered, because all of it is their own code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire import OutputKind
from quire_engine import CompletionOutput, RequestOutput
from quire_interfaces import FinishReason, RenderedPrompt, RequestError, SamplingParams
from quire_renderers import ChatFormat, OutputParser
from quire_server.answer_phases import AnswerPlan, phased_answer
from quire_server.body import read_model
from quire_server.chat import chat_turn
from quire_server.completions import CompletionAnswer, render_prompts
from quire_server.context import ServerContext, unless_disconnected
from quire_server.derender import ChoiceText, chat_answer, derender_stream, name_of
from quire_server.errors import naming_fields
from quire_server.logprobs import chat_logprobs, prompt_logprobs
from quire_server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    SamplingFields,
    check_thinking_budget,
    refuse_transfer,
)
from quire_server.responses import ChatLogprobs, Usage, sse
from quire_server.streaming import EventStream, after
from quire_server.token_protocol import (
    DerenderChatRequest,
    DerenderCompletionRequest,
    GenerateRequest,
    GenerateResponseChoice,
    ThinkingBounds,
    sampling_params_from,
    sampling_params_to_json,
)
from quire_server.tool_choice import check_tools
from quire_server.turn import PreparedTurn, prepare_turn, raise_failed

__all__ = ["Generated", "derender_chat", "derender_completion", "generate", "render_chat", "render_completion"]


class Choice(msgspec.Struct, kw_only=True):
    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    logprobs: ChatLogprobs | None = None
    text: str | UnsetType = UNSET


class Generated(msgspec.Struct, kw_only=True):
    """Whole response and streaming chunk have the same form."""

    request_id: str
    output_mode: str
    choices: list[Choice]
    prompt_logprobs: list[Any] | None = None
    usage: Usage | UnsetType = UNSET


async def generate(context: ServerContext, request: Request) -> Response:
    """POST /inference/v1/generate."""
    body = await read_model(context, request, GenerateRequest)
    refuse_transfer(body.kv_transfer_params)
    context.resolve_model(body.model)
    params = sampling_params_from(body.sampling_params)
    if body.thinking is not None:
        params = dataclasses.replace(params, detokenize=True)  # the text tells when it thinks
    elif body.output_mode == "tokens" and not params.stop:
        params = dataclasses.replace(params, detokenize=False)
    kind = OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY
    with naming_fields({"prompt": "token_ids"}):
        context.check_request(params, body.priority)
        outputs = _outputs(context, body, params, kind)
        first = await unless_disconnected(request, anext(outputs))
    name = body.request_id or f"generate-{secrets.token_hex(12)}"
    if body.stream:
        return await EventStream.begin(
            _events(name, body, context.usage_wanted(body.stream_options)[0], first, outputs)
        )
    raise_failed(first)
    return Response(msgspec.json.encode(_generated(name, body, first, has_usage=True)), media_type="application/json")


def _outputs(
    context: ServerContext, body: GenerateRequest, params: SamplingParams, kind: OutputKind
) -> AsyncIterator[RequestOutput]:
    """Check the request now, run it when iterated."""

    def run(prompt: RenderedPrompt, params: SamplingParams, kind: OutputKind) -> AsyncIterator[RequestOutput]:
        return context.llm.generate(
            prompt,
            params,
            priority=body.priority,
            cache_salt=body.cache_salt,
            adapter=context.adapter_of(body.model),
            kind=kind,
        )

    prompt, bounds = RenderedPrompt(token_ids=body.token_ids), body.thinking
    if bounds is None:
        return run(prompt, params, kind)
    form = context.llm.renderer.chat_format
    plan = AnswerPlan(
        form=form,
        max_model_len=context.llm.engine_info.max_model_len,
        budget=bounds.budget,
        forced=bounds.forced,
        thinks=bounds.thinks,
    )
    return phased_answer(
        lambda prompt, params: run(prompt, params, OutputKind.DELTA),
        _thinking_parsers(form, bounds),
        context.llm.tokenizer,
        prompt,
        params,
        plan=plan,
        kind=kind,
    )


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


async def _events(
    name: str, body: GenerateRequest, wants_usage: bool, first: RequestOutput, rest: AsyncIterator[RequestOutput]
) -> AsyncGenerator[bytes, None]:
    last = first
    async with contextlib.aclosing(after(first, rest)) as outputs:
        async for output in outputs:
            raise_failed(output)
            yield sse(_generated(name, body, output, has_usage=False))
            last = output
    if wants_usage:
        yield sse(Generated(request_id=name, output_mode=body.output_mode, choices=[], usage=_usage(body, last)))


def _generated(name: str, body: GenerateRequest, output: RequestOutput, *, has_usage: bool) -> Generated:
    return Generated(
        request_id=name,
        output_mode=body.output_mode,
        choices=[
            Choice(
                index=each.index,
                token_ids=each.token_ids,
                finish_reason=each.finish_reason,
                stop_reason=each.stop_reason if each.finished else UNSET,
                logprobs=chat_logprobs(each),
                text=each.text if body.output_mode == "text" else UNSET,
            )
            for each in output.outputs
        ],
        prompt_logprobs=None if output.prompt_logprobs is None else prompt_logprobs(output.prompt_logprobs),
        usage=_usage(body, output) if has_usage else UNSET,
    )


def _usage(body: GenerateRequest, output: RequestOutput) -> Usage:
    return Usage.of(len(body.token_ids), output.num_generation_tokens, output.num_cached_tokens)


async def render_chat(context: ServerContext, request: Request) -> Response:
    """POST /v1/chat/completions/render: what the chat route would give to the engine, for /inference/v1/generate."""
    body = await read_model(context, request, ChatCompletionRequest)
    model = context.resolve_model(body.model)
    with naming_fields(body.field_names()):
        turn = chat_turn(context, body)
        if turn.beams is not None:
            raise RequestError(
                "use_beam_search takes several requests, and cannot be rendered as one; leave it out",
                param="use_beam_search",
            )
        prepared = await prepare_turn(context, turn)
    rendered = _rendered("chatcmpl", body, model, prepared.prompt, prepared.params)
    bounds = _thinking_bounds(prepared)
    return JSONResponse(rendered if bounds is None else {**rendered, "thinking": bounds.model_dump()})


def _thinking_bounds(prepared: PreparedTurn) -> ThinkingBounds | None:
    parser, use, plan = prepared.parser(), prepared.turn.tool_use, prepared.plan
    if parser is None or not prepared.writes:
        return None
    return ThinkingBounds(
        budget=plan.budget,
        forced=plan.forced,
        thinks=plan.thinks,
        is_open=parser.is_thinking,
        tools=list(use.tools) if use.is_on else None,
        skip_special_tokens=prepared.turn.params.skip_special_tokens,
    )


async def render_completion(context: ServerContext, request: Request) -> Response:
    """POST /v1/completions/render: one request for /inference/v1/generate per prompt."""
    body = await read_model(context, request, CompletionRequest)
    model = context.resolve_model(body.model)
    with naming_fields(body.field_names()):
        params = context.sampling_params(body)
    prompts = await render_prompts(context, body, params)
    return JSONResponse([_rendered("cmpl", body, model, prompt, params) for prompt in prompts])


def _rendered(
    kind: str, body: SamplingFields, model: str, prompt: RenderedPrompt, params: SamplingParams
) -> dict[str, Any]:
    return {
        "request_id": f"{kind}-{body.request_id or secrets.token_hex(12)}",
        "model": model,
        "token_ids": prompt.token_ids,
        "sampling_params": sampling_params_to_json(params),
        "stream": bool(body.stream),
        "stream_options": None if body.stream_options is None else body.stream_options.model_dump(),
        "cache_salt": body.cache_salt,
        "priority": body.priority,
    }


async def derender_chat(context: ServerContext, request: Request) -> Response:
    """POST /v1/chat/completions/derender: token ids to the chat route's answer, calls and reasoning told apart.

    A body of events is answered by events.
    """
    if request.headers.get("content-type", "").split(";")[0].strip().lower() == "text/event-stream":
        return await derender_stream(context, request)
    body = await read_model(context, request, DerenderChatRequest)
    model = context.resolve_model(body.model)
    choices = body.generate_response.choices
    num_choices = max([each.index for each in choices], default=0) + 1
    answer, params = await chat_answer(
        context, body.generate_response, model, body.chat_request, num_choices, body.prompt_tokens
    )
    output = _whole(context, answer.running.prompt, params, choices)
    return Response(msgspec.json.encode(answer.whole(output)), media_type="application/json")


async def derender_completion(context: ServerContext, request: Request) -> Response:
    """POST /v1/completions/derender."""
    body = await read_model(context, request, DerenderCompletionRequest)
    model = context.resolve_model(body.model)
    asked = body.completion_request or CompletionRequest(prompt=[])
    asked.n = max((each.index for response in body.generate_responses for each in response.choices), default=0) + 1
    with naming_fields(asked.field_names()):
        params = context.sampling_params(asked)
    prompts = [RenderedPrompt(token_ids=[])] * len(body.generate_responses)
    outputs = [_whole(context, RenderedPrompt(token_ids=[]), params, each.choices) for each in body.generate_responses]
    name = name_of("cmpl", body.generate_responses[0])
    answer = CompletionAnswer(name, int(time.time()), model, asked, params, prompts, context, only_echo=False)
    whole = answer.whole(outputs)
    counts = body.prompt_tokens if isinstance(body.prompt_tokens, list) else [body.prompt_tokens or 0]
    if isinstance(whole.usage, Usage):
        whole.usage = whole.usage.with_prompt(sum(counts))
    return Response(msgspec.json.encode(whole), media_type="application/json")


def _whole(
    context: ServerContext,
    prompt: RenderedPrompt,
    params: SamplingParams,
    choices: Sequence[GenerateResponseChoice],
) -> RequestOutput:
    """The engine's output, made again from its token ids."""
    outputs = [_completion(context, prompt, params, choice) for choice in choices]
    return RequestOutput(
        request_id="",
        prompt=prompt.text,
        prompt_token_ids=prompt.token_ids,
        outputs=outputs,
        finished=True,
        num_generation_tokens=sum(len(each.token_ids) for each in outputs),
    )


def _completion(
    context: ServerContext, prompt: RenderedPrompt, params: SamplingParams, choice: GenerateResponseChoice
) -> CompletionOutput:
    ended = choice.model_copy(update={"finish_reason": choice.finish_reason or FinishReason.STOP})
    return ChoiceText(context, prompt, params).take(ended)
