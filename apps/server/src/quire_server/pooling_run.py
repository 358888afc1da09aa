"""Runs what pooling routes ask for: prompts of texts, pairs and conversations, and the engine's outputs in the order of
the request. Knows no protocol.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request

from quire.media import HeldMedia
from quire.pooling.batch import pool_batch
from quire.pooling.prompts import PoolingPrompt, PoolingPrompts, PromptOptions
from quire_engine import PooledRequestOutput
from quire_interfaces import (
    ContextLengthError,
    PooledOutput,
    PoolingParams,
    PoolingTask,
    QuireError,
    RenderedPrompt,
    RequestError,
    RequestOptions,
    SamplingParams,
)
from quire_server.chat_history import readable_messages
from quire_server.context import ServerContext, in_thread_when, unless_disconnected
from quire_server.errors import error_body
from quire_server.media import hold_media
from quire_server.pooling_answers import ItemError, PoolingUsage
from quire_server.pooling_protocol import CommonFields, PoolingFields, PoolingInput
from quire_server.truncation import truncated
from quire_server.turn import ChatTurn, check_request_template, render_held

__all__ = ["Pooled", "PoolingItem", "PoolingJob", "item_error", "output_of", "pool_items", "usage_of"]

Pooled = PooledRequestOutput | QuireError
"""What came of one item."""
PoolingItem = tuple[PoolingInput, PoolingInput | None]
"""A text, and the second text of a pair that the model reads together."""


@dataclass(slots=True, kw_only=True)
class PoolingJob:
    """What is asked of every item of a request alike."""

    params: PoolingParams
    options: RequestOptions
    per_item: bool = False
    """Whether items that fail leave the others alone."""
    is_large: bool = False
    """Whether rendering belongs into a worker thread."""
    prompt_options: PromptOptions = field(default_factory=lambda: PromptOptions())
    """How texts are written."""
    chat_options: dict[str, Any] = field(default_factory=dict)
    """How conversations are written: arguments of `ChatTurn`."""
    mm_processor_kwargs: dict[str, Any] | None = None
    check: Callable[[str, RenderedPrompt], None] = field(default=lambda param, prompt: None)
    """Further checks of a rendered prompt, by its place in the body; raises RequestError."""

    @classmethod
    def of(cls, context: ServerContext, body: CommonFields, task: PoolingTask | None) -> PoolingJob:
        """What a body asks for. Raises RequestError naming the field at fault."""
        context.check_priority(body.priority)
        prompt_options, chat_options = body.prompt_options(), body.chat_options()
        if prompt_options.get("chat_template") is not None:
            check_request_template(context)
        chat_options["chat_template_kwargs"] = context.template_kwargs(chat_options.get("chat_template_kwargs"))
        return cls(
            params=body.pooling_params(task),
            options=context.request_options(body, streams=False),
            per_item=body.per_item,
            is_large=body.is_large,
            prompt_options=prompt_options,
            chat_options=chat_options,
            mm_processor_kwargs=body.mm_processor_kwargs if isinstance(body, PoolingFields) else None,
        )


async def pool_items(
    context: ServerContext, request: Request, items: Sequence[PoolingItem], job: PoolingJob
) -> list[Pooled]:
    """What comes of each item, in order. All are rendered and checked before the first one runs.

    Args:
        context: Of the server.
        request: Whose client is watched: when it leaves, nothing of this runs on.
        items: Texts or pairs.
        job: What is asked of them.

    Raises:
        QuireError: unless `job.per_item`, the first item's error, which names its place in the body.
        ClientGoneError: the client closed the connection.
    """
    keep, info = job.params.truncate_prompt_tokens, context.llm.engine.info
    most = (info.max_embed_len if job.params.task == "embed" else 0) or info.max_model_len
    if keep is not None and keep > most:
        raise RequestError(
            f"truncate_prompt_tokens must be at most {most}, which this model reads, got {keep}. Please request a "
            "smaller truncation size.",
            param="truncate_prompt_tokens",
        )
    with contextlib.ExitStack() as media:
        rendered = await _rendered_items(context, items, job, media)
        return await unless_disconnected(request, _run_all(context, items, rendered, job))


async def _rendered_items(
    context: ServerContext, items: Sequence[PoolingItem], job: PoolingJob, media: contextlib.ExitStack
) -> list[PoolingPrompt | QuireError]:
    if any(each is not None and each.messages is not None for item in items for each in item):
        return [await _rendered_conversation(context, item, job, media) for item in items]
    return await in_thread_when(job.is_large, lambda: [_rendered_texts(context, item, job) for item in items])


def _rendered_texts(context: ServerContext, item: PoolingItem, job: PoolingJob) -> PoolingPrompt | QuireError:
    first, second = item
    prompt: Any = first.prompt if second is None else {"prompt": first.prompt, "text_pair": second.prompt}
    try:
        return _checked(context, first, _prompts(context).render(prompt, job.params, **job.prompt_options), job)
    except QuireError as error:
        return _named(error, item, job)


def _prompts(context: ServerContext) -> PoolingPrompts:
    assert context.llm.pooling_prompts is not None
    return context.llm.pooling_prompts


async def _rendered_conversation(
    context: ServerContext, item: PoolingItem, job: PoolingJob, media: contextlib.ExitStack
) -> PoolingPrompt | QuireError:
    """A conversation or a text; `media` releases what stands in it."""
    first, second = item
    if first.messages is None and second is None:
        return await in_thread_when(job.is_large, lambda: _rendered_texts(context, item, job))
    try:
        if second is not None:
            return await _rendered_pair(context, first, second, job, media)
        assert first.messages is not None
        turn = ChatTurn(
            messages=readable_messages(first.messages, context.modalities),
            params=SamplingParams(),
            **job.chat_options,
        )
        held = await hold_media(context, turn.messages, job.mm_processor_kwargs)
        if held is not None:
            media.callback(held.release)
        if _prompts(context).takes_documents:
            return _checked(context, first, _document(context, turn.messages, held, job), job)
        prompt = await in_thread_when(job.is_large, lambda: render_held(context, turn, held))
        keep = job.params.truncate_prompt_tokens
        keep = context.llm.engine.info.max_model_len if keep == -1 else keep
        prompt = truncated(context, prompt, keep, job.params.truncation_side or "right", turn.params)
        return _checked(context, first, PoolingPrompt(prompt, _prompts(context).spec.resolve(job.params)), job)
    except QuireError as error:
        return _named(error, item, job)


async def _rendered_pair(
    context: ServerContext, first: PoolingInput, second: PoolingInput, job: PoolingJob, media: contextlib.ExitStack
) -> PoolingPrompt:
    """A pair of which one side or both have images, videos or sounds; `media` releases them."""
    contents = [each.prompt if each.messages is None else each.messages[0]["content"] for each in (first, second)]
    try:
        held = await hold_media(context, [{"content": content} for content in contents], job.mm_processor_kwargs)
        if held is None:
            raise RequestError(
                "this model takes texts alone: send no images, videos or sounds", code="unsupported_media"
            )
        media.callback(held.release)
        query, document = ({"content": content} for content in contents)
        prompt = {"prompt": query, "text_pair": document}
        rendered = await in_thread_when(
            job.is_large, lambda: _prompts(context).render(prompt, job.params, held, **job.prompt_options)
        )
    except RequestError as error:
        for place, each in (("messages[0]", first), ("messages[1]", second)):
            if (error.param or "").startswith(place):
                error.param = f"{each.param}{str(error.param).removeprefix(place)}"
                error.args = (str(error).replace(place, each.param, 1), *error.args[1:])
        raise
    return _checked(context, first, rendered, job)


def _document(
    context: ServerContext, messages: Sequence[Any], held: HeldMedia | None, job: PoolingJob
) -> PoolingPrompt:
    """The one message of a conversation, for a model of late interaction that sees."""
    if len(messages) != 1:
        raise RequestError("this model reads one message at a time, without a chat template", param="messages")
    has_media = held is not None and held.num_embeds > 0
    prompt = {"content": messages[0]["content"]}
    return _prompts(context).render(prompt, job.params, held if has_media else None, **job.prompt_options)


def _checked(context: ServerContext, first: PoolingInput, prompt: PoolingPrompt, job: PoolingJob) -> PoolingPrompt:
    job.check(first.param, prompt.rendered)
    context.llm.engine.check(prompt.rendered, prompt.params, job.options)
    return prompt


def _named(error: QuireError, item: PoolingItem, job: PoolingJob) -> QuireError:
    """The error with the item's place in the body. Raises it unless items fail alone."""
    first, second = item
    param = getattr(error, "param", None)
    if isinstance(error, RequestError) and param == "embedding_task":  # as Jina's API calls it
        error.param = param = "task"
    head, bracket, rest = (param or "").partition("[")
    if head in ("prompt", "messages") or param is None:
        place = first.param + bracket + rest
        error.param = place  # type: ignore[attr-defined]
        message = str(error)
        if isinstance(error, ContextLengthError) and error.max_model_len is not None:
            message = (
                f"This model's maximum context length is {error.max_model_len} tokens, and the input has "
                f"{error.num_prompt_tokens or 'far more'}. Please reduce the length of the input prompt, or have it "
                "truncated."
            )
        if place not in message:
            pair = "" if second is None else f" with {second.param}"
            message = f"{first.param}{pair}: {message}"
        error.args = (message, *error.args[1:])
    if not job.per_item:
        raise error
    return error


async def _run_all(
    context: ServerContext,
    items: Sequence[PoolingItem],
    rendered: Sequence[PoolingPrompt | QuireError],
    job: PoolingJob,
) -> list[Pooled]:
    """When one fails that must not, the others are dropped."""

    async def prompt_of(place: int) -> PoolingPrompt:
        prompt = rendered[place]
        if isinstance(prompt, QuireError):
            raise prompt
        return prompt

    def on_error(place: int, error: QuireError) -> QuireError:
        return error if rendered[place] is error else _named(error, items[place], job)

    outputs = await pool_batch(context.llm.engine, len(items), prompt_of, job.options, on_error)
    for output in outputs:
        for each in () if isinstance(output, QuireError) else output.metrics:
            latency_s = each.finished_time_s - each.arrival_time_s
            context.metrics.on_pooled(str(job.params.task), each.num_prompt_tokens, latency_s)
    return outputs


def output_of(pooled: Pooled) -> PooledOutput | None:
    """The numbers of an item; None where it failed."""
    return None if isinstance(pooled, QuireError) else pooled.pooled


def item_error(pooled: Pooled) -> ItemError | UnsetType:
    """Why an item failed, for its place in the answer; UNSET where it did not."""
    if not isinstance(pooled, QuireError):
        return UNSET
    return ItemError(**error_body(pooled)["error"])


def usage_of(outputs: Sequence[Pooled]) -> PoolingUsage:
    """Tokens that were read for all items."""
    done = [each for each in outputs if not isinstance(each, QuireError)]
    return PoolingUsage.of(sum(each.num_prompt_tokens for each in done), sum(each.num_cached_tokens for each in done))
