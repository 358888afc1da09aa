"""Token ids to the answer of the chat or completions route, in one piece; `derender_stream.py` has it piece by piece.

The answer is made by the routes' own code from the engine's outputs, made again (`derender_outputs.py`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response

from quire_engine import RequestOutput
from quire_interfaces import RenderedPrompt, RequestError, SamplingParams
from quire_server.chat import ChatAnswer, chat_turn
from quire_server.completions import CompletionAnswer, completion_params, render_prompts
from quire_server.context import ServerContext, in_thread_when
from quire_server.derender_outputs import ChoiceOutputs, check_ids, check_response, request_output
from quire_server.errors import naming_fields
from quire_server.protocol import ChatCompletionRequest, CompletionRequest
from quire_server.request_ids import answer_id
from quire_server.responses import json_response
from quire_server.token_protocol import (
    DerenderChatContext,
    DerenderChatRequest,
    DerenderCompletionRequest,
    GenerateResponse,
)
from quire_server.turn import ChatTurn, prepare_turn

__all__ = ["answer_name", "chat_answer", "completion_answer", "derender_chat", "derender_completion", "naming_inside"]


async def derender_chat(context: ServerContext, body: DerenderChatRequest, request: Request) -> Response:
    """Token ids to the chat route's answer, calls and reasoning told apart."""
    response = body.generate_response
    await in_thread_when(body.is_large, lambda: check_response(context, response, "generate_response."))
    for place, choice in enumerate(response.choices):
        if not choice.token_ids:
            at = f"generate_response.choices[{place}].token_ids"
            raise RequestError(f"{at} must hold the tokens of the answer, at least one", param=at)
    num_choices = max([each.index for each in response.choices], default=0) + 1
    answer, params = await chat_answer(context, request, body, response, num_choices)

    def told() -> Response:
        whole = answer.whole(_whole(context, answer.running.prompt.token_ids, params, response))
        whole.kv_transfer_params = response.kv_transfer_params
        return json_response(whole)

    return await in_thread_when(body.is_large, told)


async def derender_completion(context: ServerContext, body: DerenderCompletionRequest, request: Request) -> Response:
    """Token ids for each of the prompts to the completions route's answer."""
    responses = body.generate_responses

    def check() -> None:
        for place, response in enumerate(responses):
            check_response(context, response, f"generate_responses[{place}].")

    await in_thread_when(body.is_large, check)
    counts, given = _per_prompt(body)
    num_choices = max((each.index for response in responses for each in response.choices), default=0) + 1
    answer = await completion_answer(
        context, request, body.model, body.completion_request, responses[0], len(responses), num_choices
    )

    def told() -> Response:
        prompts = _prompts(context, answer.prompts, given, [response.prompt_token_ids for response in responses])
        outputs = [
            _whole(context, prompt, answer.params, response)
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        answer.prompt_tokens = sum(
            prompt_length(count, len(prompt.token_ids), response)
            for count, prompt, response in zip(counts, answer.prompts, responses, strict=True)
        )
        whole = answer.whole(outputs)
        whole.kv_transfer_params = responses[0].kv_transfer_params
        return json_response(whole)

    return await in_thread_when(body.is_large, told)


def _per_prompt(body: DerenderCompletionRequest) -> tuple[Sequence[int | None], Sequence[list[int] | None]]:
    """`prompt_tokens` and `prompt_token_ids` of each response. Raises RequestError where they are of another number."""
    num = len(body.generate_responses)
    counts = body.prompt_tokens if isinstance(body.prompt_tokens, list) else None
    if isinstance(body.prompt_tokens, int):
        counts = [body.prompt_tokens, *[0] * (num - 1)]
    for name, given in (("prompt_tokens", counts), ("prompt_token_ids", body.prompt_token_ids)):
        if given is not None and len(given) != num:
            raise RequestError(
                f"{name} must hold one element per response, got {len(given)} for {num} generate_responses", param=name
            )
    return counts or [None] * num, body.prompt_token_ids or [None] * num


def _prompts(
    context: ServerContext,
    rendered: Sequence[RenderedPrompt],
    given: Sequence[list[int] | None],
    told: Sequence[list[int] | None],
) -> list[list[int]]:
    """What each output follows: the rendered prompt, else what the body names."""
    for place, token_ids in enumerate(given):
        check_ids(context, token_ids or [], f"prompt_token_ids[{place}]")
    return [prompt.token_ids or ids or others or [] for prompt, ids, others in zip(rendered, given, told, strict=True)]


def prompt_length(told: int | None, rendered: int, response: GenerateResponse) -> int:
    """The prompt's tokens for the usage: as the body says, as it was rendered here, as it was counted there."""
    if told is not None:
        return told
    return rendered or (response.usage.prompt_tokens if response.usage is not None else 0)


def answer_name(request: Request, kind: str, response: GenerateResponse) -> str:
    """The answer's id: that of the request that was rendered."""
    return response.request_id or answer_id(request, f"{kind}-")


async def chat_answer(
    context: ServerContext,
    request: Request,
    body: DerenderChatContext,
    response: GenerateResponse,
    num_choices: int | None,
) -> tuple[ChatAnswer, SamplingParams]:
    """What makes the answer from the engine's outputs, and the parameters by which these are read.

    Args:
        context: Knows the model.
        request: For the answer's id, where the response has none.
        body: With the chat request; without one the output is text.
        response: The output, or its first chunk.
        num_choices: How many choices there are; None for as many as were asked for.

    Raises:
        RequestError: naming the field of the chat request.
    """
    model, asked = context.resolve_model(body.model), body.chat_request
    check_ids(context, body.prompt_token_ids or [], "prompt_token_ids")
    chat = asked or ChatCompletionRequest(messages=[{"role": "user", "content": ""}])
    chat.kv_transfer_params, chat.priority = None, 0  # they were for the machine that generated
    if num_choices is not None:
        chat.n, chat.best_of = num_choices, None

    def make_turn() -> ChatTurn:
        turn = chat_turn(context, chat)
        return turn if asked is not None else ChatTurn(messages=turn.messages, params=turn.params)

    with naming_inside("chat_request", chat.field_names()):
        prepared = await prepare_turn(context, make_turn, is_large=body.is_large)
    prepared.release_media()
    length = prompt_length(body.prompt_tokens, len(prepared.prompt.token_ids) if asked is not None else 0, response)
    if asked is None:
        prepared.prompt = RenderedPrompt(token_ids=body.prompt_token_ids or response.prompt_token_ids or [])
        prepared.is_plain = True
    running = prepared.running(_nothing())
    name = answer_name(request, "chatcmpl", response)
    return ChatAnswer(name, int(time.time()), model, chat, running, context, length), prepared.params


async def completion_answer(
    context: ServerContext,
    request: Request,
    model: str | None,
    asked: CompletionRequest | None,
    response: GenerateResponse,
    num_prompts: int,
    num_choices: int | None,
) -> CompletionAnswer:
    """The answer of completions, with the prompts of the request, which are empty without one.

    Raises:
        RequestError: naming the field of the completion request; or it has another number of prompts.
    """
    name = context.resolve_model(model)
    body = asked or CompletionRequest(prompt=[])
    body.kv_transfer_params, body.priority = None, 0
    if num_choices is not None:
        body.n, body.best_of = num_choices, None
    prompts = [RenderedPrompt(token_ids=[])] * num_prompts
    with naming_inside("completion_request", body.field_names()):
        params, only_echo = completion_params(context, body)
        if asked is not None:
            prompts = await in_thread_when(body.is_large, lambda: render_prompts(context, body, params))
        if len(prompts) != num_prompts:
            raise RequestError(
                f"prompt holds {len(prompts)} prompts, but there are responses to {num_prompts}", param="prompt"
            )
    return CompletionAnswer(
        answer_name(request, "cmpl", response), int(time.time()), name, body, params, prompts, context, only_echo
    )


@contextlib.contextmanager
def naming_inside(field: str, names: Mapping[str, str]) -> Iterator[None]:
    """Errors raised inside name their field as one of the body's `field`; `names` as for `naming_fields`."""
    try:
        with naming_fields(names):
            yield
    except RequestError as error:
        error.param = f"{field}.{error.param}" if error.param else field
        raise


async def _nothing() -> AsyncGenerator[RequestOutput, None]:
    return
    yield


def _whole(
    context: ServerContext, prompt_token_ids: Sequence[int], params: SamplingParams, response: GenerateResponse
) -> RequestOutput:
    """The engine's output. A choice that does not say why it ended was stopped."""
    outputs = [
        ChoiceOutputs(context, prompt_token_ids, params).take(
            choice.model_copy(update={"finish_reason": choice.finish_reason or "stop"})
        )
        for choice in response.choices
    ]
    num_tokens = sum(len(each.token_ids) for each in outputs)
    return request_output(context, response, outputs, num_tokens=num_tokens)
