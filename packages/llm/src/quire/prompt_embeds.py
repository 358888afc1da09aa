"""Prompts that are embeddings: rows of the residual stream that the caller has computed, in place of tokens.

They go the way of media, as items that no tower has to read; token ids of 0 stand for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import quire_multimodal
from quire.media import HeldMedia, MediaFront
from quire.media_embeds import as_array
from quire_interfaces import ConfigError, RenderedPrompt, RequestError
from quire_models.config import ModelConfig

if TYPE_CHECKING:
    from quire_multimodal import MediaSource

__all__ = ["EmbedsPrompt", "check_prompt_embeds", "prepare_prompt_embeds", "prepare_prompt_embeds_now"]

_READ_TOKEN_IDS = ("gemma3n", "gemma4", "deepseek_v4")
"""Beginnings of the `model_type` of networks whose layers look token ids up in tables of their own."""


class EmbedsPrompt(NamedTuple):
    """A prompt ready for the engine, and what holds its embeddings until its request has ended."""

    rendered: RenderedPrompt
    media: HeldMedia


def check_prompt_embeds(model: ModelConfig) -> None:
    """Raise where a network cannot take embeddings for a prompt.

    Raises:
        ConfigError: with the reason.
    """
    reason = None
    if model.max_encoder_len:
        reason = "its prompts are read by an encoder"
    elif model.media is not None and model.media.is_bidirectional:
        reason = "its attention would take them for images (--language-model-only builds it without)"
    elif model.media is not None and model.media.cross_attention_layers:
        reason = "embeddings are what its layers with cross attention read (--language-model-only builds it without)"
    elif model.network.embedding.adds_media:
        reason = "embeddings are added to those of its tokens"
    elif model.network.embedding.project_in is not None:
        reason = "its embeddings are projected to the width of its layers"
    elif model.model_type.startswith(_READ_TOKEN_IDS) or any(
        getattr(mixer, "reads_token_ids", False) for mixer in model.network.mixers
    ):
        reason = "its layers look token ids up in tables of their own"
    if reason is not None:
        raise ConfigError(
            f"{model.architecture} takes no embeddings as prompts: {reason}; leave --enable-prompt-embeds out",
            field="enable_prompt_embeds",
        )


async def prepare_prompt_embeds(front: MediaFront | None, value: Any, param: str = "prompt_embeds") -> EmbedsPrompt:
    """A prompt of embeddings, without keeping the event loop from its work.

    Args:
        front: Of the model.
        value: Floating-point numbers [N, width] or [1, N, width]: a tensor, an array, or what `torch.save` or
            `numpy.save` writes of one, as bytes or in base64.
        param: Field of the request, for errors.

    Raises:
        RequestError: no such tensor, or the engine takes none.
    """
    taking = _taking(front, param)
    return _placed(await taking.prepare(await asyncio.to_thread(_sources, taking, value, param)))


def prepare_prompt_embeds_now(front: MediaFront | None, value: Any, param: str = "prompt_embeds") -> EmbedsPrompt:
    """`prepare_prompt_embeds` for callers without an event loop; blocks."""
    taking = _taking(front, param)
    return _placed(taking.prepare_now(_sources(taking, value, param)))


def _taking(front: MediaFront | None, param: str) -> MediaFront:
    """The front, if it takes embeddings as prompts. Raises RequestError."""
    if front is None or not front.preparer.config.enable_prompt_embeds:
        raise RequestError(
            "prompts that are embeddings are not taken here: give text or token ids, or start with "
            "--enable-prompt-embeds",
            param=param,
            code="unsupported",
        )
    return front


def _sources(front: MediaFront, value: Any, param: str) -> Sequence[MediaSource]:
    return quire_multimodal.split_prompt_embeds(as_array(value), front.hidden_size, front.embeds_width, param=param)


def _placed(held: HeldMedia) -> EmbedsPrompt:
    token_ids = [0] * held.num_embeds
    return EmbedsPrompt(RenderedPrompt(token_ids=token_ids, media=held.place(token_ids)), held)
