"""What the routes of text would give to the engine, as bodies for /inference/v1/generate, in vLLM's shapes.

Everything is checked as it would be there. Knows the shape of the answer; what is rendered is the routes' own code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire_interfaces import RenderedPrompt, RequestError, SamplingParams
from quire_server.body import read_model
from quire_server.chat import chat_turn
from quire_server.completions import completion_params, render_prompts
from quire_server.context import ServerContext, in_thread_when
from quire_server.errors import naming_fields
from quire_server.messages import messages_turn
from quire_server.messages_request import MessagesRequest
from quire_server.protocol import ChatCompletionRequest, CompletionRequest, SamplingFields
from quire_server.request_ids import answer_id
from quire_server.responses import json_response
from quire_server.token_protocol import MediaFeatures, ThinkingBounds, sampling_params_to_json
from quire_server.turn import ChatTurn, PreparedTurn, prepare_turn

__all__ = ["render_chat", "render_completion", "render_messages", "rendered_turn"]


async def render_chat(context: ServerContext, request: Request) -> Response:
    """POST /v1/chat/completions/render: what the chat route would give to the engine, for /inference/v1/generate."""
    body = await read_model(context, request, ChatCompletionRequest)
    model, transfer = context.resolve_model(body.model), _take_transfer(body)
    with naming_fields(body.field_names()):
        if body.use_beam_search:
            raise RequestError(
                "use_beam_search takes several requests, and cannot be rendered as one; leave it out",
                param="use_beam_search",
            )
        name = answer_id(request, "chatcmpl-", body.request_id)
        return await rendered_turn(context, body, name, model, lambda: chat_turn(context, body), transfer)


async def rendered_turn(
    context: ServerContext,
    body: SamplingFields,
    name: str,
    model: str,
    make_turn: Callable[[], ChatTurn],
    kv_transfer_params: Any = None,
) -> Response:
    """The request for the engine that a turn becomes.

    Raises:
        RequestError: naming the field at fault.
    """
    prepared = await prepare_turn(context, make_turn, is_large=body.is_large)
    prepared.release_media()

    def answer() -> Response:
        special = prepared.turn.add_special_tokens
        context.llm.engine.check(prepared.prompt, prepared.params, prepared.turn.options)
        rendered = _rendered(context, body, name, model, prepared.prompt, prepared.params, special)
        rendered["kv_transfer_params"] = kv_transfer_params
        bounds = _thinking_bounds(prepared)
        return json_response(rendered if bounds is None else {**rendered, "thinking": bounds.model_dump()})

    return await in_thread_when(body.is_large, answer)


async def render_messages(context: ServerContext, request: Request) -> Response:
    """POST /v1/messages/render: the same of the Messages API."""
    body = await read_model(context, request, MessagesRequest)
    model, transfer = context.resolve_model(body.model), _take_transfer(body)
    with naming_fields(body.field_names()):
        name = answer_id(request, "msg_", body.request_id)
        return await rendered_turn(context, body, name, model, lambda: messages_turn(context, body), transfer)


def _take_transfer(body: SamplingFields) -> Any:
    """`kv_transfer_params` are for the machine that generates, and go on to it."""
    transfer, body.kv_transfer_params = body.kv_transfer_params, None
    return transfer


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
    model, transfer = context.resolve_model(body.model), _take_transfer(body)
    for field, reason in (
        ("use_beam_search", "takes several requests, and cannot be rendered as one"),
        ("prompt_embeds", "are no token ids"),
    ):
        if getattr(body, field):
            raise RequestError(f"{field} {reason}; leave it out", param=field)
    options, name = context.request_options(body), answer_id(request, "cmpl-", body.request_id)

    def answer() -> Response:
        with naming_fields(body.field_names()):
            params, _ = completion_params(context, body)
            prompts = render_prompts(context, body, params)
            for prompt in prompts:
                context.llm.engine.check(prompt, params, options)
        special = body.add_special_tokens if body.add_special_tokens is not None else True
        rendered = [_rendered(context, body, name, model, prompt, params, special) for prompt in prompts]
        return json_response([{**each, "kv_transfer_params": transfer} for each in rendered])

    return await in_thread_when(body.is_large, answer)


def _rendered(
    context: ServerContext,
    body: SamplingFields,
    name: str,
    model: str,
    prompt: RenderedPrompt,
    params: SamplingParams,
    add_special_tokens: bool,
) -> dict[str, Any]:
    """Fields of vLLM's that nothing is said of are null."""
    offsets = None
    if body.return_token_offsets:
        offsets = context.llm.renderer.token_offsets(prompt, add_special_tokens=add_special_tokens)
    return {
        "request_id": name,
        "model": model,
        "token_ids": prompt.token_ids,
        "token_offsets": offsets,
        "sampling_params": sampling_params_to_json(params),
        "stream": bool(body.stream),
        "stream_options": None if body.stream_options is None else body.stream_options.model_dump(),
        "cache_salt": body.cache_salt,
        "priority": body.priority,
        "features": None if prompt.media is None else MediaFeatures.of(prompt.media).model_dump(),
        "kv_transfer_params": None,
    }
