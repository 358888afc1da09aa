"""Media of prompts in front of the engine: found in messages, prepared, and held until their request has ended.

Joins `quire_multimodal`, which prepares items, with the renderer, which knows where they stand. Knows the shapes of
content parts; knows no route and no engine.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import quire_multimodal  # names are loaded when they are used: a server of texts loads neither numpy nor Pillow
from quire.config import QuireConfig
from quire.media_embeds import EmbedsItem, embeds_of_part, embeds_of_value
from quire.speech.sounds import sound_preparer
from quire_interfaces import CheckpointError, Modality, PromptMedia
from quire_models.config import ModelConfig
from quire_multimodal import MediaConfig, MediaError
from quire_renderers import modality_of

if TYPE_CHECKING:
    from quire_multimodal import MediaSource, MediaStats, StoredItem

__all__ = [
    "HeldMedia",
    "MediaFront",
    "MediaPart",
    "content_sources",
    "media_front",
    "media_part",
    "media_sources",
    "prompt_sources",
    "rendered_source",
]

_logger = logging.getLogger(__name__)


class MediaPart(NamedTuple):
    """What a part of a message's content, `{"type": "image", "source": MediaPart(...)}`, is read from."""

    source: MediaSource


class HeldMedia:
    """The media of one prompt, kept in the store until `release`: `quire_interfaces.PreparedMedia`.

    An object that nobody holds any longer counts as released: an answer may end before anybody asked for its first
    token.

    Args:
        front: Which prepared them.
        items: In the order of the request.
    """

    def __init__(self, front: MediaFront, items: Sequence[StoredItem]) -> None:
        self.placeholders = front.placeholders
        self.has_special_tokens = front.preparer.frame is not None and bool(items)
        self.is_encoder_input = front.is_encoder_input
        """An encoder reads them; no token of a prompt stands for them."""
        self._preparer = front.preparer
        self._items = list(items)
        self._ordered = self._items
        self._finalizer = weakref.finalize(self, front.abandoned.append, self._items)
        self._finalizer.atexit = False

    def expand(self, text: str) -> str:
        """The text with each placeholder replaced by the text of its item. Raises MediaError."""
        text, self._ordered = self._preparer.expand(text, self._items)
        return text

    def place(self, token_ids: Sequence[int]) -> PromptMedia:
        """The spans of the expanded text's tokens, and their positions. Raises MediaError."""
        return self._preparer.place(self._ordered, token_ids)

    @property
    def num_embeds(self) -> int:
        """Number of rows that its items take in the input of the language model."""
        return sum(stored.item.num_embeds for stored in self._items)

    def release(self) -> None:
        """The request has ended. Idempotent."""
        if self._finalizer.detach() is not None:
            self._preparer.release(self._items)


class MediaFront:
    """Prepares media of messages and prompts for one model. Thread-safe.

    Args:
        folder: Of the checkpoint; None where media are not taken, but prompts that are embeddings.
        config: Bounds, sources, processes, memory.
        model: Says the width of embeddings, and what an encoder reads.

    Raises:
        CheckpointError: the checkpoint has no processor that can be loaded.
    """

    def __init__(self, folder: Path | None, config: MediaConfig, model: ModelConfig) -> None:
        self.is_encoder_input = model.encoder_takes_audio
        """A sound is what the network's encoder reads, in place of a prompt."""
        self.hidden_size = model.hidden_size
        """Width of the residual stream."""
        self.embeds_width = model.hidden_size if model.media is None else model.media.width
        """Width of the embeddings of an item, further features of a network that reads some included."""
        self.preparer = (
            sound_preparer(config, model, folder)
            if self.is_encoder_input and folder is not None
            else quire_multimodal.MediaPreparer(
                folder,
                config,
                embeds_width=self.embeds_width,
                is_prefix_lm=model.media is not None and model.media.is_prefix_lm,
                has_cross_attention=model.media is not None and bool(model.media.cross_attention_layers),
                is_added=model.media is not None and model.media.is_added,
            )
        )
        self.abandoned: deque[list[StoredItem]] = deque()
        """Items whose holder was collected, maybe while a lock was held; released when the next ones are prepared."""

    @property
    def placeholders(self) -> Mapping[str, str]:
        """Token that a chat template writes for an item, by modality: what the model takes."""
        return self.preparer.placeholders

    async def prepare(self, sources: Sequence[MediaSource], arguments: Mapping[str, Any] | None = None) -> HeldMedia:
        """The items of a prompt, without keeping the event loop from its work.

        Args:
            sources: In the order of the prompt.
            arguments: The request's `mm_processor_kwargs`.

        Raises:
            MediaError: naming the part of the request whose medium cannot be used.
            OverloadedError: the shared memory is full of items in use.
        """
        self._release_abandoned()
        return HeldMedia(self, await self.preparer.prepare(sources, arguments) if sources else [])

    def prepare_now(self, sources: Sequence[MediaSource], arguments: Mapping[str, Any] | None = None) -> HeldMedia:
        """`prepare` for callers without an event loop; blocks."""
        self._release_abandoned()
        return HeldMedia(self, self.preparer.prepare_now(sources, arguments) if sources else [])

    def hold(self, features: Any) -> HeldMedia:
        """A spectrogram that an encoder is to read. Raises OverloadedError."""
        self._release_abandoned()
        assert isinstance(self.preparer, quire_multimodal.SpectrogramPreparer)
        return HeldMedia(self, [self.preparer.hold(features)])

    def stats(self) -> dict[str, MediaStats]:
        """What was asked for and prepared since the start, by modality."""
        return self.preparer.stats()

    def reset(self) -> None:
        """Forget every prepared item that no request holds."""
        self._release_abandoned()
        self.preparer.reset()

    def close(self) -> None:
        """End the preparing processes and remove what they prepared."""
        self.preparer.close()

    def remove_store(self) -> None:
        """Remove what was prepared, and nothing else; for an end of this process that waits for nothing."""
        self.preparer.remove_store()

    def _release_abandoned(self) -> None:
        while self.abandoned:
            self.preparer.release(self.abandoned.popleft())


def media_front(config: QuireConfig, folder: Path, model: ModelConfig) -> MediaFront | None:
    """What prepares the media of a model, and prompts that are embeddings. None for a model that takes text only, is
    to, or has no processor that can be loaded: then the log says why, and texts are served.
    """
    if model.media is not None or model.encoder_takes_audio:
        try:
            return MediaFront(folder, config.media, model)
        except CheckpointError as error:
            _logger.warning("media cannot be prepared, and the model takes text only: %s", error)
    elif model.media_refusal:
        _logger.warning("media of %s are not served, texts are: %s", model.architecture, model.media_refusal)
    return MediaFront(None, config.media, model) if config.media.enable_prompt_embeds else None


def media_sources(messages: Sequence[Any]) -> list[MediaSource]:
    """The media of a conversation, in order.

    Args:
        messages: In the chat API's form; a wrong one holds no media, and the renderer refuses it.

    Raises:
        MediaError: naming the part that is not as it should be.
    """
    sources = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        sources += content_sources(content, f"messages[{index}].content")
    return sources


def content_sources(content: Any, param: str) -> list[MediaSource]:
    """The media of a message's content, in order.

    Args:
        content: In the chat API's form; what is no list of parts holds no media.
        param: Its place in the request.

    Raises:
        MediaError: naming the part that is not as it should be.
    """
    return [
        _source(part, f"{param}[{place}]")
        for place, part in enumerate(content if isinstance(content, (list, tuple)) else ())
        if isinstance(part, Mapping) and modality_of(part.get("type")) is not None
    ]


def media_part(part: Mapping[str, Any], param: str) -> dict[str, Any]:
    """A part of a content as one that remembers where the client sent it.

    Args:
        part: In one of the chat API's spellings.
        param: Its place in the request.

    Raises:
        MediaError: naming the part that is not as it should be.
    """
    source = _source(part, param)
    return {"type": str(source.modality), "source": MediaPart(source)}


def _source(part: Mapping[str, Any], param: str) -> MediaSource:
    if isinstance(own := part.get("source"), MediaPart):
        return own.source
    kind = part["type"]
    modality = modality_of(kind)
    assert modality is not None
    uuid = part.get("uuid")
    if uuid is not None and (not isinstance(uuid, str) or not uuid):
        raise MediaError(f"uuid must be a text, got {uuid!r:.100}").at(param)
    if kind in ("image_embeds", "audio_embeds"):
        return _embeds_source(part, modality, param)
    value = next(
        (part[key] for key in (kind, str(modality), f"{modality}_url", "url") if part.get(key) is not None), None
    )
    url, data = _url_or_data(value, modality, param)
    if url is None and data is None and part.get("file_id") is not None:
        message = "ids of files are read by servers with --files-dir alone: send a url or data"
        raise MediaError(message, code="unsupported_media").at(param)
    if url is None and data is None and uuid is None:
        message = f"it must have {kind!r} with a url, or a uuid of one that was sent before"
        raise MediaError(message).at(param)
    return quire_multimodal.MediaSource(modality=modality, url=url, value=data, uuid=uuid, param=param)


def _embeds_source(part: Mapping[str, Any], modality: Modality, param: str) -> MediaSource:
    try:
        embeds = embeds_of_part(part, part["type"])
    except MediaError as error:
        raise error.at(param) from None
    uuid = part.get("uuid")
    if embeds is None and uuid is None:
        raise MediaError(f"it must have {part['type']!r}, or a uuid of one that was sent before").at(param)
    value, facts = embeds or (None, {})
    return quire_multimodal.MediaSource(
        modality=modality, value=value, is_embeds=True, facts=facts, uuid=uuid, param=param
    )


def _url_or_data(value: Any, modality: Modality, param: str) -> tuple[str | None, Any]:
    """Where a part's medium is, or the medium: of an object with a url or data, a URL, or what Python has decoded."""
    if not isinstance(value, Mapping):
        return (value, None) if isinstance(value, str) else (None, value)
    url, data = value.get("url"), value.get("data")
    if url is None and isinstance(data, str):
        url = f"data:{modality}/{value.get('format') or '*'};base64,{data}"
    if not isinstance(url, str):
        message = f"it must have a url, or data in base64, got {sorted(map(str, value))!r:.100}"
        raise MediaError(message).at(param)
    return url, None


def rendered_source(modality: Modality, key: str, param: str) -> MediaSource:
    """An item of a prompt that was rendered before.

    Args:
        modality: Of the item.
        key: `MediaItem.key`.
        param: Its place in the request.
    """
    return quire_multimodal.MediaSource(modality=modality, key=key, param=param)


def prompt_sources(prompt: Mapping[str, Any]) -> list[MediaSource]:
    """The media of a prompt in Python: `multi_modal_data`, with the names of `multi_modal_uuids` if it has them.

    Args:
        prompt: vLLM's dictionary, e.g. `{"prompt": "USER: <image> ...", "multi_modal_data": {"image": image}}`; a
            value is one item or a list of them: a Pillow image, an array, encoded bytes, or a URL; a
            sound may be a pair of an array and its samples in a second, a video one of its frames and their metadata.
            Or embeddings that the caller has computed (`embeds_of_value`).

    Raises:
        MediaError: a modality that is not known, or uuids that are not as many as the items.
    """
    data, uuids = prompt.get("multi_modal_data") or {}, prompt.get("multi_modal_uuids") or {}
    sources = []
    for name in {**data, **uuids}:
        if name not in (Modality.IMAGE, Modality.VIDEO, Modality.AUDIO):
            message = f"multi_modal_data has image, video and audio, got {name!r}"
            raise MediaError(message, param="multi_modal_data", code="unsupported_media")
        own = _listed(uuids.get(name), Modality(name))
        items = _items(data.get(name), Modality(name)) or [None] * len(own)
        own = own or [None] * len(items)
        if len(items) != len(own):
            message = f"multi_modal_uuids names {len(own)} of {name}, and there are {len(items)}"
            raise MediaError(message, param="multi_modal_uuids")
        for index, (item, uuid) in enumerate(zip(items, own, strict=True)):
            param = f"multi_modal_data.{name}[{index}]"
            kind = {"url": item} if isinstance(item, str) else {"value": item}
            if isinstance(item, EmbedsItem):
                kind = {"value": item.value, "facts": item.facts, "is_embeds": True}
            sources.append(quire_multimodal.MediaSource(modality=Modality(name), uuid=uuid, param=param, **kind))
    return sources


def _items(value: Any, modality: Modality) -> list[Any]:
    """The items of a value of `multi_modal_data`; embeddings as `EmbedsItem`."""
    try:
        embeds = embeds_of_value(value, modality)
    except MediaError as error:
        raise error.at(f"multi_modal_data.{modality}") from None
    return _listed(value, modality) if embeds is None else list(embeds)


def _listed(value: Any, modality: Modality) -> list[Any]:
    """One item, or several, as a list; a list of frames is one video."""
    if value is None:
        return []
    if not isinstance(value, list):
        return [value]
    is_frames = modality is Modality.VIDEO and bool(value) and _is_image(value[0])
    return [value] if is_frames else value


def _is_image(value: Any) -> bool:
    """Whether a value is one picture: an image of Pillow, or an array of three axes."""
    return hasattr(value, "convert") or len(getattr(value, "shape", ())) == 3
