"""Which tools a request offers, and whether the model may, must not or must call one.

One meaning for the three chat protocols; each translates its own spelling into `ToolUse`. Knows no engine.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire_interfaces import RequestError

__all__ = ["ToolUse", "chat_tool_use", "check_tools"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of one request."""

    tools: tuple[dict[str, Any], ...] = ()
    """In the chat API's form."""
    mode: str = "auto"
    """"none", "auto" or "required"; "shown" for tools that the model knows of, but whose calls stay text."""
    name: str | None = None
    """With "required": the one tool to call."""
    parallel: bool = True
    """Whether one answer may hold several calls."""

    @property
    def is_on(self) -> bool:
        """Whether calls are looked for in the answer."""
        return bool(self.tools) and self.mode not in ("none", "shown")

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a call."""
        return bool(self.tools) and self.mode == "required"

    @property
    def shown(self) -> list[dict[str, Any]] | None:
        """What the template is given: nothing when no call is wanted."""
        return list(self.tools) if self.tools and self.mode != "none" else None

    @property
    def callable_tools(self) -> tuple[dict[str, Any], ...]:
        """The tools of which one may be called."""
        return tuple(tool for tool in self.tools if self.name in (None, tool["function"]["name"]))


def check_tools(tools: Sequence[dict[str, Any]]) -> None:
    """Check function tools in the chat API's form.

    Raises:
        RequestError: naming the tool and field at fault.
    """
    for index, tool in enumerate(tools):
        at = f"tools[{index}]"
        kind = tool.get("type", "function")
        if kind != "function":
            raise _wrong(f"{at}.type", kind, "be 'function'; other tools are not served here")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise _wrong(f"{at}.function", function, "be an object with the name of a function")
        check_function(function, f"{at}.function")


def check_function(function: dict[str, Any], at: str) -> None:
    """Check one function's name and parameters. Raises RequestError naming the field, which begins with `at`."""
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not 0 < len(name) <= 256 or not _is_name(name):
        raise _wrong(f"{at}.name", name, "be 1 to 256 letters, digits, '_', '-', '.', ':' or '/'")
    if parameters is not None and not isinstance(parameters, dict):
        raise _wrong(f"{at}.parameters", parameters, "be a JSON schema, an object")


def _is_name(name: str) -> bool:
    return all(char.isalnum() or char in "_-.:/" for char in name)


def chat_tool_use(
    tools: Sequence[dict[str, Any]] | None, choice: str | dict[str, Any] | None, parallel: bool | None
) -> ToolUse:
    """What `tools`, `tool_choice` and `parallel_tool_calls` of a chat completion mean.

    Raises:
        RequestError: naming the field at fault.
    """
    tools = tuple(tools or ())
    check_tools(tools)
    use = ToolUse(tools=tools, parallel=parallel is not False)
    if choice is None:
        return use
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise _wrong("tool_choice", choice, "be 'none', 'auto', 'required' or the name of a tool as an object")
        use = replace(use, mode=choice)
    else:
        use = _from_object(use, choice)
    if use.mode == "required" and not tools:
        raise RequestError(
            f"tool_choice {reprlib.repr(choice)} needs tools; give them, or leave tool_choice out", param="tool_choice"
        )
    return use


def _from_object(use: ToolUse, choice: dict[str, Any]) -> ToolUse:
    kind = choice.get("type")
    if kind == "function":
        function = choice.get("function")
        return named(use, function.get("name") if isinstance(function, dict) else None, "tool_choice.function.name")
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools")
        if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
            raise _wrong("tool_choice.allowed_tools", allowed, "hold a mode, 'auto' or 'required', and tools")
        return allow_only(use, allowed.get("tools"), allowed["mode"], "tool_choice.allowed_tools.tools")
    raise _wrong("tool_choice.type", kind, "be 'function' or 'allowed_tools'")


def named(use: ToolUse, name: Any, at: str) -> ToolUse:
    """The same with one tool that must be called. Raises RequestError when it is not offered."""
    names = [tool["function"]["name"] for tool in use.tools]
    if name not in names:
        offered = ", ".join(repr(each) for each in names[:20]) or "none"
        raise _wrong(at, name, f"name one of the tools; offered: {offered}")
    return replace(use, mode="required", name=name)


def allow_only(use: ToolUse, tools: Any, mode: str, at: str) -> ToolUse:
    """The same with some of the tools. Raises RequestError when one is not offered."""
    by_name = {tool["function"]["name"]: tool for tool in use.tools}
    chosen = []
    for tool in tools if isinstance(tools, list) else [tools]:
        holder = tool.get("function", tool) if isinstance(tool, dict) else {}
        name = holder.get("name") if isinstance(holder, dict) else None
        if not isinstance(name, str) or name not in by_name:
            raise _wrong(at, name, "name tools that are offered")
        chosen.append(by_name[name])
    return replace(use, tools=tuple(chosen), mode=mode)


def _wrong(param: str, value: Any, must: str) -> RequestError:
    return RequestError(f"{param} must {must}, got {reprlib.repr(value)}", param=param)
