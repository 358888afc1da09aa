"""POST /generative_scoring: how likely a model that generates goes on with certain tokens, in vLLM's shapes."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from quire.prompts import naming_prompt
from quire_engine import RequestOutput
from quire_interfaces import RenderedPrompt, RequestError, RequestOptions, SamplingParams
from quire_server.body import read_model
from quire_server.config import MAX_PROMPTS
from quire_server.context import ServerContext, all_of, in_thread_when, unless_disconnected
from quire_server.errors import naming_fields
from quire_server.protocol import LenientBody
from quire_server.request_fields import Int, Texts, TokenId, TokenIds, at_most
from quire_server.request_ids import answer_id
from quire_server.responses import Usage, json_response
from quire_server.turn import raise_failed

__all__ = ["GenerativeScores", "GenerativeScoringRequest", "generative_scoring"]


ListsOfTokenIds = Annotated[list[TokenIds], Field(fail_fast=True)]


class GenerativeScoringRequest(LenientBody):
    """Body of POST /generative_scoring."""

    model: str | None = None
    query: str | TokenIds
    items: Annotated[Texts | ListsOfTokenIds, at_most(MAX_PROMPTS)] = Field(min_length=1)
    label_token_ids: list[TokenId] = Field(min_length=1, max_length=128)
    apply_softmax: bool = True
    """Probabilities among the labels; else among all tokens."""
    item_first: bool = False
    add_special_tokens: bool = True
    """Around the query."""
    priority: Int = 0
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    request_id: str | None = Field(default=None, min_length=1, max_length=256)
    stream: bool | None = None


class GenerativeScore(msgspec.Struct, kw_only=True):
    index: int
    object: str = "score"
    score: float
    """Probability of the first label."""
    token_probs: dict[str, float]
    """Label -> its probability; an extension."""


class GenerativeScores(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[GenerativeScore]
    usage: Usage


async def generative_scoring(context: ServerContext, request: Request) -> Response:
    """Probabilities of label tokens behind a query and each of several items."""
    body = await read_model(context, request, GenerativeScoringRequest)
    model = context.resolve_model(body.model)
    labels, vocab_size = tuple(dict.fromkeys(body.label_token_ids)), context.llm.engine.info.vocab_size
    if (largest := max(labels)) >= vocab_size:
        raise RequestError(
            f"label_token_ids holds {largest}, and token ids of this model are below {vocab_size}",
            param="label_token_ids",
        )
    if len(body.items) > context.config.max_prompts_per_request:
        raise RequestError(
            f"items holds {len(body.items)} items, this server takes {context.config.max_prompts_per_request} at most "
            "(--max-prompts-per-request)",
            param="items",
        )
    if body.stream:
        raise RequestError("scores are not streamed: leave stream out", param="stream", code="unsupported")
    params = SamplingParams(max_tokens=1, temperature=0.0, logprob_token_ids=labels, detokenize=False)
    context.check_priority(body.priority)
    options = context.request_options(body, streams=False)
    prompts = await in_thread_when(body.is_large, lambda: _prompts(context, body))
    name, created = answer_id(request, "generative-scoring-", body.request_id), int(time.time())
    work = all_of(_final(context, prompt, params, options, place, len(prompts)) for place, prompt in enumerate(prompts))
    with naming_fields({"prompt": "items"}):
        outputs = await unless_disconnected(request, work)

    def answer() -> Response:
        data = []
        for index, output in enumerate(outputs):
            raise_failed(output)
            probs = _probabilities(output, labels, among_labels=body.apply_softmax)
            data.append(
                GenerativeScore(
                    index=index,
                    score=probs[labels[0]],
                    token_probs={str(token_id): each for token_id, each in probs.items()},
                )
            )
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        usage = Usage.of(num_tokens, 0, sum(output.num_cached_tokens for output in outputs))
        return json_response(GenerativeScores(id=name, created=created, model=model, data=data, usage=usage))

    return await in_thread_when(body.is_large, answer)


def _prompts(context: ServerContext, body: GenerativeScoringRequest) -> list[RenderedPrompt]:
    """A prompt for each item: the tokens of the query and of the item, each made of its text alone, one behind the
    other."""
    renderer = context.llm.renderer

    def token_ids(text: str | list[int], param: str, *, special: bool) -> list[int]:
        try:
            return renderer.render_prompt(text, add_special_tokens=special).token_ids if text else []
        except RequestError as error:
            raise RequestError(f"{param}: {error}", param=param) from None

    query = token_ids(body.query, "query", special=body.add_special_tokens)
    prompts = []
    items: Sequence[str | list[int]] = body.items
    for place, item in enumerate(items):
        with naming_prompt(place, len(body.items), "items"):
            own = token_ids(item, "items", special=False)
            ids = [*own, *query] if body.item_first else [*query, *own]
            if not ids:
                raise RequestError("query and item are both empty", param="items")
        prompts.append(RenderedPrompt(token_ids=ids))
    return prompts


async def _final(
    context: ServerContext,
    prompt: RenderedPrompt,
    params: SamplingParams,
    options: RequestOptions,
    place: int,
    num_items: int,
) -> RequestOutput:
    with naming_prompt(place, num_items, "items"):
        async with contextlib.aclosing(context.llm.engine.generate(prompt, params, options)) as outputs:
            return await anext(outputs)


def _probabilities(output: RequestOutput, labels: Sequence[int], *, among_labels: bool) -> Mapping[int, float]:
    """Label -> its probability at the first place behind the prompt."""
    positions: Any = output.outputs[0].logprobs
    logprobs = {each.token_id: each.logprob for each in positions[0]}
    own = [logprobs[token_id] for token_id in labels]
    largest = max(own) if among_labels else 0.0
    if largest == -math.inf:
        return dict.fromkeys(labels, 1.0 / len(labels))
    weights = [math.exp(each - largest) for each in own]
    whole = sum(weights) if among_labels else 1.0
    return {token_id: weight / whole for token_id, weight in zip(labels, weights, strict=True)}
