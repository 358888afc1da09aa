"""Messages of chat completions as the model is given them: calls of custom tools as calls of functions, and lines in
place of what it cannot read in old turns and in results of tools.

Wrong messages stay as they are, for the renderer to refuse. Knows no engine.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from quire_renderers import modality_of
from quire_server.client_tools import INPUT
from quire_server.content_text import content_text

__all__ = ["readable_messages"]

_TEXT = ("text", "input_text", "output_text", "refusal")


def readable_messages(messages: Sequence[Any], modalities: Collection[str] = ()) -> list[Any]:
    """The messages, those that need no change as they are.

    Args:
        messages: As they were sent.
        modalities: What the model takes beside text; a model that takes any gets all media, of which others are refused
            by name.
    """
    newest = len(messages) - 1 if messages and _role(messages[-1]) == "user" else None
    return [
        _readable(message, modalities, is_new=index == newest) if isinstance(message, dict) else message
        for index, message in enumerate(messages)
    ]


def _readable(message: dict[str, Any], modalities: Collection[str], *, is_new: bool) -> dict[str, Any]:
    content, calls = message.get("content"), message.get("tool_calls")
    has_media = bool(modalities) and isinstance(content, list) and any(map(_is_medium, content))
    if has_media:
        pass  # the renderer tells media from the rest
    elif isinstance(content, list) and not is_new and any(_is_unreadable(part) for part in content):
        message = {**message, "content": content_text(content, "content", is_new=False)}
    if isinstance(calls, list) and any(_is_custom(call) for call in calls):
        message = {**message, "tool_calls": [_as_function(call) if _is_custom(call) else call for call in calls]}
    return message


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _is_medium(part: Any) -> bool:
    return isinstance(part, dict) and modality_of(part.get("type")) is not None


def _is_unreadable(part: Any) -> bool:
    """Whether a part has a type, and this is none of text."""
    return isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] not in _TEXT


def _is_custom(call: Any) -> bool:
    return isinstance(call, dict) and isinstance(call.get("custom"), dict) and "function" not in call


def _as_function(call: dict[str, Any]) -> dict[str, Any]:
    custom = call["custom"]
    arguments = json.dumps({INPUT: str(custom.get("input") or "")}, ensure_ascii=False)
    return {"id": call.get("id"), "type": "function", "function": {"name": custom.get("name"), "arguments": arguments}}
