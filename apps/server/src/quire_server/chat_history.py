"""Messages of chat completions as the model is given them: calls of custom tools as calls of functions, and lines in
place of what it cannot read in old turns and in results of tools.

Wrong messages stay as they are, for the renderer to refuse. Knows no engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from quire_server.client_tools import INPUT
from quire_server.content_text import content_text

__all__ = ["readable_messages"]

_TEXT = ("text", "input_text", "output_text", "refusal")


def readable_messages(messages: Sequence[Any]) -> list[Any]:
    """The messages, those that need no change as they are."""
    newest = len(messages) - 1 if messages and _role(messages[-1]) == "user" else None
    return [
        _readable(message, is_new=index == newest) if isinstance(message, dict) else message
        for index, message in enumerate(messages)
    ]


def _readable(message: dict[str, Any], *, is_new: bool) -> dict[str, Any]:
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list) and not is_new and any(_is_unreadable(part) for part in content):
        message = {**message, "content": content_text(content, "content", is_new=False)}
    if isinstance(calls, list) and any(_is_custom(call) for call in calls):
        message = {**message, "tool_calls": [_as_function(call) if _is_custom(call) else call for call in calls]}
    return message


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _is_unreadable(part: Any) -> bool:
    """Whether a part has a type, and this is none of text."""
    return isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] not in _TEXT


def _is_custom(call: Any) -> bool:
    return isinstance(call, dict) and isinstance(call.get("custom"), dict) and "function" not in call


def _as_function(call: dict[str, Any]) -> dict[str, Any]:
    custom = call["custom"]
    arguments = json.dumps({INPUT: str(custom.get("input") or "")}, ensure_ascii=False)
    return {"id": call.get("id"), "type": "function", "function": {"name": custom.get("name"), "arguments": arguments}}
