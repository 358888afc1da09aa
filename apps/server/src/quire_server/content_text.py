"""What a model that reads text is given in place of a part of a message's content.

Text is text. An image, a sound or a file in an old turn or in a tool's result is named by a line, so that the model
knows that there was something and no conversation becomes impossible; in the newest message of the user it is refused.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection
from typing import Any

from quire.media import media_part
from quire_interfaces import RequestError
from quire_renderers import modality_of
from quire_server.content_parts import Content, content_of

__all__ = ["content_text", "left_out_line", "seen_content"]

_NAMES = {
    "image": "image", "image_url": "image", "input_image": "image", "computer_screenshot": "screenshot",
    "audio": "sound", "input_audio": "sound", "video_url": "video", "input_video": "video",
    "file": "file", "input_file": "file", "document": "document",
}  # fmt: skip


def content_text(value: Any, at: str, *, is_new: bool) -> str:
    """The text of a content: a text, or a list of parts.

    Args:
        value: The content.
        at: Its place.
        is_new: Whether it is what the user asks now: then what cannot be read is refused.

    Raises:
        RequestError: naming the part at fault.
    """
    if isinstance(value, str):
        return value
    if value is None and not is_new:
        return ""
    if not isinstance(value, list):
        raise RequestError(f"{at} must be text or a list of parts, got {reprlib.repr(value)}", param=at)
    return "".join(_part_text(part, f"{at}[{index}]", is_new) for index, part in enumerate(value))


_MEDIA_FILES = ("image", "video", "audio")
"""Beginnings of the media types of files that are media."""


def seen_content(value: Any, at: str, modalities: Collection[str], *, is_new: bool) -> Content:
    """A content whose media the model sees, files that are images among them; else its text. Arguments and errors as
    those of `content_text`.

    Args:
        modalities: What the model takes beside text.
    """
    if not modalities or not isinstance(value, list):
        return content_text(value, at, is_new=is_new)
    texts: list[str] = []
    media: dict[int, dict[str, Any]] = {}
    for index, part in enumerate(value):
        medium = _medium(part)
        if medium is not None:
            media[index] = media_part(medium, f"{at}[{index}]")
        texts.append(_part_text(part, f"{at}[{index}]", is_new) if medium is None else "")
    return content_of(texts, (), media)


def _medium(part: Any) -> dict[str, Any] | None:
    """The part, if it is a medium; a file that is an image, a video or a sound as one."""
    if not isinstance(part, dict):
        return None
    if modality_of(part.get("type")) is not None:
        return part
    data = part.get("file_data")
    if part.get("type") != "input_file" or not isinstance(data, str):
        return None
    kind = data[: data.find("/") + 1].lower()
    return next(({"type": each, f"{each}_url": data} for each in _MEDIA_FILES if kind == f"data:{each}/"), None)


def _part_text(part: Any, at: str, is_new: bool) -> str:
    if isinstance(part, str):
        return part
    holder = part if isinstance(part, dict) else {}
    text = next((holder[key] for key in ("text", "refusal") if isinstance(holder.get(key), str)), None)
    if text is not None:
        return str(text)
    kind = holder.get("type") if isinstance(part, dict) else type(part).__name__
    if is_new:
        raise RequestError(
            f"{at} is of type {reprlib.repr(kind)}, and this model takes text only; send parts of type 'input_text'",
            param=at,
            code="unsupported_content_type",
        )
    return left_out_line(kind, holder.get("filename"))


def left_out_line(kind: Any, name: Any = None) -> str:
    """A line in place of what is no text.

    Args:
        kind: Its type.
        name: Of its file, where there is one.
    """
    what = _NAMES.get(kind, reprlib.repr(kind)) if isinstance(kind, str) else "part of an unknown type"
    named = f" {name[:200]!r}" if isinstance(name, str) and name else ""
    return f"[{what}{named} left out: this model reads text only]\n"
