"""Pairs of a query and a document, each a text or parts of a message in the chat API's form, with images and the like
where the model takes them.

Importing this module loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire.media import content_sources
from quire_interfaces import RequestError

if TYPE_CHECKING:
    from quire_multimodal import MediaSource

__all__ = ["pair_content", "pair_sources", "side_text"]

_SIDES = ("prompt", "text_pair")
"""Keys of a pair's query and document in a prompt dictionary."""


def pair_sources(prompt: Mapping[str, Any]) -> list[MediaSource]:
    """The media of a pair, the query's first; none of another prompt.

    Args:
        prompt: A prompt dictionary.

    Raises:
        RequestError: a part is not as it should be.
    """
    if prompt.get("text_pair") is None:
        return []
    return [source for name in _SIDES for source in content_sources(pair_content(prompt.get(name), name), name)]


def pair_content(side: Any, param: str) -> str | list[Any]:
    """One side of a pair as the content of a message.

    Args:
        side: Text, or a dictionary with `content`, a text or a list of parts; or with vLLM's `multi_modal_data` and
            maybe `prompt`, the text behind them.
        param: Its place in the request.

    Raises:
        RequestError: it is none of these.
    """
    if isinstance(side, str):
        return side
    fields: Mapping[str, Any] = side if isinstance(side, Mapping) else {}
    content, media = fields.get("content"), fields.get("multi_modal_data")
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return list(content)
    if isinstance(media, Mapping):
        parts = [
            {"type": modality, modality: item}
            for modality, items in media.items()
            for item in (items if isinstance(items, list) else [items])
        ]
        text = fields.get("prompt")
        return [*parts, *([{"type": "text", "text": text}] if text is not None else [])]
    raise RequestError(
        "text_pair goes with a prompt that is text, or an object with content or multi_modal_data, as it is itself; "
        f"{param} is {type(side).__name__}",
        param="text_pair",
    )


def side_text(side: Any, param: str) -> str:
    """One side of a pair that is text alone; parts of text are a line each.

    Raises:
        RequestError: it is not.
    """
    content = pair_content(side, param)
    if isinstance(content, str):
        return content
    texts = [part.get("text") for part in content if isinstance(part, Mapping)]
    if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{param} of a pair must be text for this model, and holds other parts", param=param)
    return "\n".join(map(str, texts))
