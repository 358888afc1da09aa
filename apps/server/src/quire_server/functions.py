"""`functions` and `function_call`, which chat completions had before tools: taken as tools, answered in the old shape.

Knows both spellings; what tools mean stands in `tool_choice`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from msgspec import UNSET

from quire_interfaces import RequestError
from quire_server.client_tools import ClientTool, ClientTools, check_function
from quire_server.responses import ChatMessage, Delta
from quire_server.tool_choice import ToolUse, named

__all__ = ["as_tool_messages", "function_use", "in_old_shape"]


def function_use(functions: Sequence[dict[str, Any]], choice: str | dict[str, Any] | None) -> ToolUse:
    """What `functions` and `function_call` mean: tools, of which an answer calls one at most.

    Raises:
        RequestError: naming the field at fault.
    """
    offered = ClientTools()
    for index, function in enumerate(functions):
        check_function(function, f"functions[{index}]")
        offered.add(ClientTool(function=function, name=function["name"]), f"functions[{index}]")
    use = ToolUse.of(offered, parallel=False)
    if choice is None:
        return use
    if isinstance(choice, dict):
        return named(use, choice.get("name"), "function_call.name")
    if choice not in ("none", "auto"):
        raise RequestError(
            f"function_call must be 'none', 'auto' or an object with the name of a function, got "
            f"{reprlib.repr(choice)}",
            param="function_call",
        )
    return replace(use, mode=choice)


def as_tool_messages(messages: Sequence[Any]) -> list[Any]:
    """Messages whose calls and results are those of tools, as chat templates know them. What is no message stays as it
    is, for the renderer to refuse."""
    result = []
    called = ""
    for index, message in enumerate(messages):
        if isinstance(message, dict) and isinstance(message.get("function_call"), dict):
            called = f"call{index:05d}"  # nine letters and digits: some templates take no other ids
            others = {name: value for name, value in message.items() if name != "function_call"}
            call = {"id": called, "type": "function", "function": message["function_call"]}
            result.append({**others, "tool_calls": [call]})
        elif isinstance(message, dict) and message.get("role") == "function":
            result.append({**message, "role": "tool", "tool_call_id": called or f"call{index:05d}"})
        else:
            result.append(message)
    return result


def in_old_shape(message: ChatMessage | Delta) -> None:
    """Say the call of an answer, or of a piece of one, in `function_call` instead of `tool_calls`."""
    if isinstance(message.tool_calls, list):
        function = message.tool_calls[0].function
        message.function_call = function
        message.tool_calls = None if isinstance(message, ChatMessage) else UNSET
