"""What a model that reads text is given in place of a part of a message's content.

Text is text. An image, a sound or a file in an old turn or in a tool's result is named by a line, so that the model
knows that there was something and no conversation becomes impossible; in the newest message of the user it is refused.
"""

from __future__ import annotations

import reprlib
from typing import Any

from quire_interfaces import RequestError

__all__ = ["content_text", "left_out_line"]

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
