"""Media of a turn: found in its messages, prepared while the event loop goes on, and held until its answer has ended.

Knows no protocol: each has made parts of the chat API's of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from quire.media import HeldMedia, media_sources, rendered_source
from quire.prompt_embeds import EmbedsPrompt, prepare_prompt_embeds
from quire_interfaces import PromptMedia, RequestError
from quire_server.context import ServerContext
from quire_server.token_protocol import MediaReference

__all__ = ["hold_media", "hold_prompt_embeds", "hold_rendered", "place_rendered", "released_after"]

Output = TypeVar("Output")


async def hold_media(
    context: ServerContext, messages: Sequence[Any], arguments: Mapping[str, Any] | None
) -> HeldMedia | None:
    """The media of a conversation, prepared; None where the model takes text only.

    Args:
        context: Of the server.
        messages: In the chat API's form.
        arguments: The request's `mm_processor_kwargs`.

    Raises:
        RequestError: naming the part that cannot be used, or any if the server was started for text only.
    """
    media = context.llm.media
    if media is not None and media.placeholders:
        # What a caller names is that caller's, where there are several.
        sources = [
            source if source.uuid is None else replace(source, uuid=context.caller_salt(source.uuid))
            for source in media_sources(messages)
        ]
        return await media.prepare(sources, arguments)
    if context.llm.config.model.language_model_only and (sources := media_sources(messages)):
        raise RequestError(
            f"{sources[0].param} is of kind {sources[0].modality}, and this server was started with "
            "--language-model-only: it takes text only",
            param=sources[0].param,
            code="unsupported_media",
        )
    return None


async def hold_rendered(context: ServerContext, items: Sequence[MediaReference]) -> HeldMedia | None:
    """Items of a prompt that was rendered before, kept until they are released; None without any.

    Args:
        context: Of the server.
        items: In the order of the prompt.

    Raises:
        RequestError: naming the one that is not there any more.
    """
    if not items:
        return None
    media = context.llm.media
    if media is None:
        raise RequestError(
            "this server takes text only; leave features out", param="features", code="unsupported_media"
        )
    return await media.prepare([rendered_source(each.modality, each.key, each.param) for each in items])


def place_rendered(held: HeldMedia, items: Sequence[MediaReference], token_ids: Sequence[int]) -> PromptMedia:
    """Where the items of a rendered prompt stand. Raises RequestError where its tokens say otherwise."""
    placed = held.place(token_ids)
    for item, span in zip(items, placed.spans, strict=True):
        if item.offset != span.start:
            raise RequestError(
                f"{item.param} stands at token {span.start}, not at {item.offset}", param="features.mm_placeholders"
            )
    return placed


async def hold_prompt_embeds(context: ServerContext, values: Sequence[str]) -> list[EmbedsPrompt]:
    """Prompts that are embeddings, kept until they are released.

    Args:
        context: Of the server.
        values: Each as `torch.save` or `numpy.save` writes it, in base64.

    Raises:
        RequestError: naming the one that cannot be used; none is kept then.
    """
    prompts: list[EmbedsPrompt] = []
    try:
        for index, value in enumerate(values):
            param = f"prompt_embeds[{index}]" if len(values) > 1 else "prompt_embeds"
            prompts.append(await prepare_prompt_embeds(context.llm.media, value, param))
    except BaseException:
        for prompt in prompts:
            prompt.media.release()
        raise
    return prompts


async def released_after(outputs: AsyncGenerator[Output, None], held: HeldMedia) -> AsyncGenerator[Output, None]:
    """The outputs of an answer, whose media are released when it ends, however it ends."""
    try:
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output
    finally:
        held.release()
