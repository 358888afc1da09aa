"""The forms of a prompt that the Python API takes, and what becomes of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, Protocol, TypedDict, cast

from quire.media import HeldMedia, MediaFront, prompt_sources
from quire.prompt_embeds import EmbedsPrompt, prepare_prompt_embeds, prepare_prompt_embeds_now
from quire.speech.sounds import render_sound_prompt, sound_fields
from quire_interfaces import PreparedMedia, QuireError, RenderedPrompt, RequestError

__all__ = [
    "ParsedPrompt", "Prompt", "TextPrompt", "TokensPrompt", "name_prompt", "naming_prompt", "parse_prompt",
    "parse_prompt_async", "parse_prompts", "release_media",
]  # fmt: skip


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str | None]
    """Only prompts with the same salt share what is cached of them."""
    multi_modal_data: NotRequired[Mapping[str, Any] | None]
    """Images, videos and sounds whose placeholders stand in the text: modality -> an item, or a list of items."""
    multi_modal_uuids: NotRequired[Mapping[str, Any] | None]
    """Names of the items' contents, which stand for their hashes; one that was sent before needs no data."""
    mm_processor_kwargs: NotRequired[Mapping[str, Any] | None]
    """Arguments of the model's processor."""


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str | None]
    """Their text, for `RequestOutput.prompt`; the ids are what runs."""
    cache_salt: NotRequired[str | None]
    """Only prompts with the same salt share what is cached of them."""


class EmbedsPromptDict(TypedDict):
    """A prompt as embeddings, where the engine was made with `enable_prompt_embeds`."""

    prompt_embeds: Any
    """Tensor or array of floating-point numbers [tokens, hidden_size]."""
    prompt: NotRequired[str | None]
    """Their text, for `RequestOutput.prompt`."""
    cache_salt: NotRequired[str | None]
    """Only prompts with the same salt share what is cached of them."""


class EncoderDecoderPrompt(TypedDict):
    """A prompt for a model that reads it with an encoder."""

    encoder_prompt: str | Sequence[int] | Mapping[str, Any]
    decoder_prompt: NotRequired[str | Sequence[int] | Mapping[str, Any] | None]
    """What the output is to begin with."""
    cache_salt: NotRequired[str | None]
    """Only prompts with the same salt share what is cached of them."""


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | EmbedsPromptDict | EncoderDecoderPrompt | Mapping[str, Any]
"""Text, token ids, or a dictionary."""

_KEYS = (
    "prompt",
    "prompt_token_ids",
    "prompt_embeds",
    "encoder_prompt",
    "decoder_prompt",
    "cache_salt",
    "multi_modal_data",
    "multi_modal_uuids",
    "mm_processor_kwargs",
)
_UNREAD_KEYS = frozenset(("token_type_ids",))
"""Keys of vLLM's prompts that nothing here reads; taken where they are None."""


class _Renderer(Protocol):
    def render_prompt(
        self, prompt: str | Sequence[int], *, add_special_tokens: bool = True, media: PreparedMedia | None = None
    ) -> RenderedPrompt: ...


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """A prompt ready for the engine."""

    rendered: RenderedPrompt
    cache_salt: str | None = None
    media: HeldMedia | None = None
    """What stands in it, held until its request has ended."""


def release_media(prompts: Iterable[ParsedPrompt]) -> None:
    """Let go of what stands in prompts whose requests have ended."""
    for prompt in prompts:
        if prompt.media is not None:
            prompt.media.release()


def parse_prompts(
    prompts: Prompt | Iterable[Prompt], renderer: _Renderer, media: MediaFront | None = None
) -> list[ParsedPrompt]:
    """One prompt, or several.

    Args:
        prompts: In any form.
        renderer: Makes tokens of them.
        media: Prepares what stands in them; None where the model takes text only.

    Raises:
        RequestError: what is no prompt; of several, the message says which one.
    """
    if _is_one_prompt(prompts):
        return [parse_prompt(cast(Prompt, prompts), renderer, media)]
    if not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts must be a text, token ids, a dictionary, or several of these, got {type(prompts).__name__}",
            param="prompts",
        )
    many = list(prompts)
    parsed = []
    for index, prompt in enumerate(many):
        with naming_prompt(index, len(many)):
            parsed.append(parse_prompt(cast(Prompt, prompt), renderer, media))
    return parsed


@contextlib.contextmanager
def naming_prompt(index: int, count: int, field: str = "prompts") -> Iterator[None]:
    """A refusal within says which prompt of `count` in `field` it is about, if there are several."""
    try:
        yield
    except RequestError as error:
        name_prompt(error, index, count, field)
        raise


def name_prompt(error: QuireError, index: int, count: int, field: str = "prompts") -> None:
    """Say in a refusal which prompt of `count` in `field` it is about, if there are several."""
    if count > 1 and isinstance(error, RequestError):
        error.args = (f"{field}[{index}]: {error}",)


def parse_prompt(prompt: Prompt, renderer: _Renderer, media: MediaFront | None = None) -> ParsedPrompt:
    """A prompt ready for the engine; arguments as for `parse_prompts`.

    Raises:
        RequestError: it is no prompt, or a dictionary with a key that is not known.
    """
    if not isinstance(prompt, Mapping):
        return ParsedPrompt(renderer.render_prompt(prompt))
    fields = _fields(prompt)
    if fields.get("prompt_embeds") is not None:
        text = _text_of_embeds(fields)
        return _parsed_embeds(fields, text, prepare_prompt_embeds_now(media, fields["prompt_embeds"]))
    fields = sound_fields(fields)
    sources = prompt_sources(fields)
    held = taking(media).prepare_now(sources, fields.get("mm_processor_kwargs")) if sources else None
    return ParsedPrompt(_rendered(fields, renderer, held), _cache_salt(fields), held)


async def parse_prompt_async(prompt: Prompt, renderer: _Renderer, media: MediaFront | None = None) -> ParsedPrompt:
    """`parse_prompt` while the event loop goes on. Arguments and errors as there."""
    if not isinstance(prompt, Mapping):
        return ParsedPrompt(renderer.render_prompt(prompt))
    fields = _fields(prompt)
    if fields.get("prompt_embeds") is not None:
        text = _text_of_embeds(fields)
        return _parsed_embeds(fields, text, await prepare_prompt_embeds(media, fields["prompt_embeds"]))
    fields = sound_fields(fields)
    sources = prompt_sources(fields)
    held = await taking(media).prepare(sources, fields.get("mm_processor_kwargs")) if sources else None
    return ParsedPrompt(_rendered(fields, renderer, held), _cache_salt(fields), held)


def _fields(prompt: Any) -> Mapping[str, Any]:
    """A prompt dictionary, whose keys are known. Raises RequestError."""
    fields: Mapping[str, Any] = prompt
    _check_keys(fields)
    return fields


def _text_of_embeds(prompt: Mapping[str, Any]) -> str | None:
    """The text that a prompt of embeddings is said to be. Raises RequestError for what cannot stand beside them."""
    for key in ("prompt_token_ids", "encoder_prompt", "decoder_prompt", "multi_modal_data", "multi_modal_uuids"):
        if prompt.get(key) is not None:
            raise RequestError(f"{key} cannot come with prompt_embeds, which takes its place", param=key)
    text = prompt.get("prompt")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"prompt must be the text of prompt_embeds, got {text!r}", param="prompt")
    return text


def _parsed_embeds(prompt: Mapping[str, Any], text: str | None, embeds: EmbedsPrompt) -> ParsedPrompt:
    return ParsedPrompt(dataclasses.replace(embeds.rendered, text=text), _cache_salt(prompt), embeds.media)


def taking(media: MediaFront | None) -> MediaFront:
    """What prepares media. Raises RequestError where none are taken."""
    if media is None:
        raise RequestError(
            "this model takes text only, or was started for text only (language_model_only); leave multi_modal_data "
            "out",
            param="multi_modal_data",
            code="unsupported_media",
        )
    return media


def _rendered(prompt: Mapping[str, Any], renderer: _Renderer, media: HeldMedia | None) -> RenderedPrompt:
    if media is not None and media.is_encoder_input:
        return render_sound_prompt(prompt, renderer, media)
    if prompt.get("encoder_prompt") is not None:
        return _render_pair(prompt, renderer)
    if prompt.get("decoder_prompt") is not None:
        raise RequestError("decoder_prompt comes with an encoder_prompt only", param="decoder_prompt")
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if token_ids is not None:
        rendered = renderer.render_prompt(token_ids, media=media)
        if text is None:
            return rendered
        if not isinstance(text, str):
            raise RequestError(f"prompt must be the text of prompt_token_ids, got {text!r}", param="prompt")
        return dataclasses.replace(rendered, text=text)
    if text is None:
        raise RequestError(
            "a prompt dictionary must have 'prompt', 'prompt_token_ids', 'prompt_embeds' or 'encoder_prompt', got "
            f"{sorted(prompt)}",
            param="prompt",
        )
    return renderer.render_prompt(text, media=media)


def _render_pair(prompt: Mapping[str, Any], renderer: _Renderer) -> RenderedPrompt:
    for key in ("prompt", "prompt_token_ids"):
        if prompt.get(key) is not None:
            raise RequestError(f"{key} cannot come with encoder_prompt, which takes its place", param=key)
    encoder = parse_prompt(prompt["encoder_prompt"], renderer)
    decoder_token_ids: list[int] = []
    if decoder_prompt := prompt.get("decoder_prompt"):
        if isinstance(decoder_prompt, Mapping):
            _check_keys(decoder_prompt)
            decoder_prompt = decoder_prompt.get("prompt_token_ids") or decoder_prompt.get("prompt") or []
        if decoder_prompt:  # a text that is to be continued gets no end token
            decoder_token_ids = list(renderer.render_prompt(decoder_prompt, add_special_tokens=False).token_ids)
    return dataclasses.replace(encoder.rendered, decoder_token_ids=decoder_token_ids)


def _check_keys(prompt: Mapping[str, Any]) -> None:
    for key, value in prompt.items():
        if key in _KEYS or (key in _UNREAD_KEYS and value is None):
            continue
        known_keys = ", ".join(_KEYS)
        raise RequestError(f"a prompt dictionary has no key {key!r}; there are {known_keys}", param=str(key))


def _cache_salt(prompt: Mapping[str, Any]) -> str | None:
    salt = prompt.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestError(f"cache_salt must be a non-empty text, got {salt!r}", param="cache_salt")
    return salt


def _is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, (str, Mapping)):
        return True
    return isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], int)
