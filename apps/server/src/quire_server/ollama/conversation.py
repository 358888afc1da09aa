"""Ollama's messages as the chat API's: images as parts, calls with ids and arguments as text. Knows no engine."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from typing import Any

from quire_interfaces import RequestError

__all__ = ["chat_messages", "image_parts"]

_MAGIC = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}
_DEFAULT = "jpeg"


def image_parts(images: Sequence[Any], param: str) -> list[dict[str, Any]]:
    """Images in base64 as parts of the chat API.

    Args:
        images: As the client sent them.
        param: Their place in the body.

    Raises:
        RequestError: one is no text in base64.
    """
    return [_image_part(image, f"{param}[{index}]") for index, image in enumerate(images)]


def _image_part(image: Any, param: str) -> dict[str, Any]:
    if not isinstance(image, str) or not image:
        raise RequestError(f"{param} must be an image in base64", param=param)
    if not image.startswith("data:"):
        try:
            head = base64.b64decode(image[:16] + "=" * (-len(image[:16]) % 4), validate=True)
        except (binascii.Error, ValueError):
            raise RequestError(f"{param} must be an image in base64", param=param) from None
        kind = next((name for magic, name in _MAGIC.items() if head.startswith(magic)), _DEFAULT)
        image = f"data:image/{kind};base64,{image}"
    return {"type": "image_url", "image_url": {"url": image}}


def chat_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation. Results of tools name their tool; they belong to its calls in the order of these.

    Raises:
        RequestError: naming the message at fault.
    """
    open_calls: list[tuple[str, str]] = []
    """Name and id of each call that has no result yet."""
    result: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        param = f"messages[{index}]"
        changed = {key: value for key, value in message.items() if key in ("role", "content", "name")}
        if images := message.get("images"):
            if not isinstance(images, list):
                raise RequestError(f"{param}.images must be a list", param=f"{param}.images")
            text = message.get("content") or ""
            parts = image_parts(images, f"{param}.images")
            changed["content"] = [*parts, {"type": "text", "text": text}] if text else parts
        if message.get("thinking"):
            changed["reasoning_content"] = message["thinking"]
        if calls := message.get("tool_calls"):
            changed["tool_calls"] = _calls(calls, f"{param}.tool_calls", len(result), open_calls)
        if message.get("role") == "tool":
            name, call_id = _answered_call(message, open_calls)
            changed |= {"tool_call_id": call_id, **({"name": name} if name else {})}
        result.append(changed)
    return result


def _calls(calls: Any, param: str, place: int, open_calls: list[tuple[str, str]]) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{param} must be a list", param=param)
    result = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str):
            raise RequestError(
                f"{param}[{index}].function must be an object with name and arguments", param=f"{param}[{index}]"
            )
        own_id = call.get("id")
        call_id = own_id if isinstance(own_id, str) and own_id else f"call_{place}_{index}"
        arguments = function.get("arguments") or {}
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        result.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": text}})
        open_calls.append((name, call_id))
    return result


def _answered_call(message: dict[str, Any], open_calls: list[tuple[str, str]]) -> tuple[str, str]:
    """Name and id of the call that a result belongs to: the one of its id, the first one of its name, or the first."""
    name, call_id = message.get("tool_name") or message.get("name") or "", message.get("tool_call_id")
    found = next((each for each in open_calls if each[1] == call_id), None)
    found = found or next((each for each in open_calls if each[0] == name), None)
    found = found or next((each for each in open_calls if not name), None)
    if found is None:
        return str(name), str(call_id or "call_0")
    open_calls.remove(found)
    return found
