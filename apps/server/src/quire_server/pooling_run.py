"""Runs what pooling routes ask for: which task this server has, prompts of texts, pairs and conversations, and the
engine's outputs in the order of the request. Knows no protocol.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from msgspec import UNSET, UnsetType
from starlette.requests import Request

from quire.pooling_prompts import PoolingPrompts
from quire_engine import PooledRequestOutput
from quire_interfaces import (
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
from quire_server.context import ServerContext, all_of, in_thread_when, unless_disconnected
from quire_server.errors import HTTPError, error_body
from quire_server.media import hold_media
from quire_server.pooling_answers import ItemError, PoolingUsage
from quire_server.pooling_protocol import PoolingFields, PoolingInput
from quire_server.truncation import truncated
from quire_server.turn import ChatTurn, render_held

__all__ = [
    "Pooled", "PoolingItem", "PoolingJob", "item_error", "output_of", "pool_items", "task_of", "usage_of",
]  # fmt: skip

MAX_IN_FLIGHT = 256
"""Items of one request that the engine has at a time: enough to fill its batches, and room is left for others."""

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
    prompt_name: str | None = None
    """The checkpoint's prompt that is put before texts; None for its default."""
    add_special_tokens: bool | None = None
    """None for True with texts, and for False with conversations."""
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    check: Callable[[str, RenderedPrompt], None] = field(default=lambda param, prompt: None)
    """Further checks of a rendered prompt, by its place in the body; raises RequestError."""

    @classmethod
    def of(cls, context: ServerContext, body: PoolingFields, task: PoolingTask | None) -> PoolingJob:
        """What a body asks for. Raises RequestError naming the field at fault."""
        context.check_priority(body.priority)
        return cls(
            params=body.pooling_params(task),
            options=context.request_options(body, streams=False),
            per_item=body.errors == "per_item",
            is_large=body.is_large,
            mm_processor_kwargs=body.mm_processor_kwargs,
        )


class _Rendered(NamedTuple):
    prompt: RenderedPrompt
    params: PoolingParams


def task_of(context: ServerContext, *tasks: PoolingTask) -> PoolingTask:
    """The first of the tasks that the served model has.

    Raises:
        HTTPError: 404, it has none of them; the message says how a server has.
    """
    served = context.llm.engine.info.pooling_tasks
    for task in tasks:
        if task in served:
            return task
    info, task = context.llm.engine.info, tasks[0]
    does = f"its tasks are {', '.join(served)}" if served else "it generates text"
    model, conversion = _REMEDIES.get(task, ("another model", ""))
    raise HTTPError(
        404,
        f"this route needs the pooling task {task!r}, which {info.model} does not have: {does}; serve {model} "
        f"(--runner pooling){conversion}",
        code="unsupported_task",
    )


_EMBED = ("an embedding model", ", or make one of this model (--convert embed)")
_CLASSIFY = ("a model with classes", ", or make one of this model (--convert classify)")
_RERANK = ("a reranking or embedding model", ", or make one of this model (--convert classify or embed)")
_REMEDIES: dict[str, tuple[str, str]] = {
    "embed": _EMBED,
    "token_embed": _EMBED,
    "classify": _CLASSIFY,
    "token_classify": _CLASSIFY,
    "score": _RERANK,
}
"""Task -> a model that has it, and how another one gets it."""


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
    keep, most = job.params.truncate_prompt_tokens, context.llm.engine.info.max_model_len
    if keep is not None and keep > most:
        raise RequestError(
            f"truncate_prompt_tokens must be at most {most}, which this model reads, got {keep}",
            param="truncate_prompt_tokens",
        )
    with contextlib.ExitStack() as media:
        rendered = await _rendered_items(context, items, job, media)
        return await unless_disconnected(request, _run_all(context, items, rendered, job))


async def _rendered_items(
    context: ServerContext, items: Sequence[PoolingItem], job: PoolingJob, media: contextlib.ExitStack
) -> list[_Rendered | QuireError]:
    if any(each is not None and each.messages is not None for item in items for each in item):
        return [await _rendered_conversation(context, item, job, media) for item in items]
    return await in_thread_when(job.is_large, lambda: [_rendered_texts(context, item, job) for item in items])


def _rendered_texts(context: ServerContext, item: PoolingItem, job: PoolingJob) -> _Rendered | QuireError:
    first, second = item
    prompt: Any = first.prompt if second is None else {"prompt": first.prompt, "text_pair": second.prompt}
    special = True if job.add_special_tokens is None else job.add_special_tokens
    try:
        rendered = _prompts(context).render(prompt, job.params, prompt_name=job.prompt_name, add_special_tokens=special)
        return _checked(context, first, _Rendered(rendered.rendered, rendered.params), job)
    except QuireError as error:
        return _named(error, item, job)


def _prompts(context: ServerContext) -> PoolingPrompts:
    assert context.llm.pooling_prompts is not None
    return context.llm.pooling_prompts


async def _rendered_conversation(
    context: ServerContext, item: PoolingItem, job: PoolingJob, media: contextlib.ExitStack
) -> _Rendered | QuireError:
    """A conversation or a text; `media` releases what stands in it."""
    first, second = item
    if first.messages is None and second is None:
        return await in_thread_when(job.is_large, lambda: _rendered_texts(context, item, job))
    try:
        if second is not None or first.messages is None:
            raise RequestError("pairs are of texts alone: send no images, videos or sounds", code="unsupported_media")
        turn = ChatTurn(
            messages=readable_messages(first.messages, context.modalities),
            params=SamplingParams(),
            add_generation_prompt=job.add_generation_prompt,
            continue_final_message=job.continue_final_message,
            chat_template=job.chat_template,
            chat_template_kwargs=context.template_kwargs(job.chat_template_kwargs),
            add_special_tokens=bool(job.add_special_tokens),
        )
        held = await hold_media(context, turn.messages, job.mm_processor_kwargs)
        if held is not None:
            media.callback(held.release)
        prompt = await in_thread_when(job.is_large, lambda: render_held(context, turn, held))
        keep = job.params.truncate_prompt_tokens
        keep = context.llm.engine.info.max_model_len if keep == -1 else keep
        prompt = truncated(context, prompt, keep, job.params.truncation_side or "right", turn.params)
        return _checked(context, first, _Rendered(prompt, _prompts(context).spec.resolve(job.params)), job)
    except QuireError as error:
        return _named(error, item, job)


def _checked(context: ServerContext, first: PoolingInput, rendered: _Rendered, job: PoolingJob) -> _Rendered:
    job.check(first.param, rendered.prompt)
    context.llm.engine.check(rendered.prompt, rendered.params, job.options)
    return rendered


def _named(error: QuireError, item: PoolingItem, job: PoolingJob) -> QuireError:
    """The error with the item's place in the body. Raises it unless items fail alone."""
    first, second = item
    param = getattr(error, "param", None)
    head, bracket, rest = (param or "").partition("[")
    if head in ("prompt", "messages") or param is None:
        place = first.param + bracket + rest
        error.param = place  # type: ignore[attr-defined]
        message = str(error)
        if place not in message:
            pair = "" if second is None else f" with {second.param}"
            error.args = (f"{first.param}{pair}: {message}", *error.args[1:])
    if not job.per_item:
        raise error
    return error


async def _run_all(
    context: ServerContext, items: Sequence[PoolingItem], rendered: Sequence[_Rendered | QuireError], job: PoolingJob
) -> list[Pooled]:
    """At most `MAX_IN_FLIGHT` at a time; when one fails that must not, the others are dropped."""
    outputs: list[Pooled | None] = [each if isinstance(each, QuireError) else None for each in rendered]
    waiting = iter([index for index, each in enumerate(outputs) if each is None])

    async def run_next() -> None:
        for index in waiting:
            outputs[index] = await _run(context, items[index], cast(_Rendered, rendered[index]), job)

    await all_of(run_next() for _ in range(min(MAX_IN_FLIGHT, len(items))))
    return cast("list[Pooled]", outputs)


async def _run(context: ServerContext, item: PoolingItem, rendered: _Rendered, job: PoolingJob) -> Pooled:
    try:
        output = await context.llm.engine.encode(rendered.prompt, rendered.params, job.options)
        if output.error is not None:
            raise output.error
        for each in output.metrics:
            latency_s = each.finished_time_s - each.arrival_time_s
            context.metrics.on_pooled(str(rendered.params.task), each.num_prompt_tokens, latency_s)
    except QuireError as error:
        return _named(error, item, job)
    return output


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
