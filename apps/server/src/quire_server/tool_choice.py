"""Which tools a request offers, and whether the model may, must not or must call one.

One meaning for the three chat protocols; each translates its own spelling into `ToolUse`. Knows no engine.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire_interfaces import RequestError, wrong_value
from quire_server.client_tools import ClientTool, ClientTools, check_function, custom_tool
from quire_server.request_warnings import hosted_tool

__all__ = [
    "ToolUse",
    "allow_names",
    "allow_only",
    "chat_client_tools",
    "chat_tool_use",
    "check_function",
    "check_required",
    "check_tools",
    "named",
]


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
    unshown: frozenset[str] = frozenset()
    """Names of tools that the template is not given."""
    offered: ClientTools = field(default_factory=ClientTools)
    """The client's tools in their own shapes, and what was left out."""

    @classmethod
    def of(cls, offered: ClientTools, more: Sequence[dict[str, Any]] = (), *, parallel: bool = True) -> ToolUse:
        """The client's tools, and `more` functions that the server runs itself."""
        return cls(tools=(*offered.chat_tools(), *more), parallel=parallel, offered=offered)

    def without(self, names: Collection[str], *, unshown: Collection[str] = ()) -> ToolUse:
        """This use without some tools; those of `unshown` can be called, but the conversation itself describes them."""
        tools = tuple(tool for tool in self.tools if tool["function"]["name"] not in names)
        return replace(self, tools=tools, unshown=frozenset(unshown))

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
        tools = [tool for tool in self.tools if tool["function"]["name"] not in self.unshown]
        return tools if tools and self.mode != "none" else None

    def parameters_at(self, tool: dict[str, Any]) -> str:
        """The client's field that holds the schema of a tool's parameters."""
        offered = self.offered.get(tool["function"]["name"])
        return offered.parameters_at if offered else f"tools[{self.tools.index(tool)}].function.parameters"

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
        kind, function = tool.get("type", "function"), tool.get("function")
        if kind != "function":
            raise wrong_value(f"{at}.type", kind, "be 'function'")
        if not isinstance(function, dict):
            raise wrong_value(f"{at}.function", function, "be an object with the name of a function")
        check_function(function, f"{at}.function")


def check_required(use: ToolUse, choice: Any) -> None:
    """Raises RequestError when a call is required and there is no tool to call."""
    if use.mode != "required" or use.tools:
        return
    left_out = "; ".join(warning.message for warning in use.offered.warnings[:3])
    reason = f" ({left_out})" if left_out else ""
    raise RequestError(
        f"tool_choice {reprlib.repr(choice)} needs tools{reason}; give functions, or leave tool_choice out",
        param="tool_choice",
    )


def chat_client_tools(tools: Sequence[dict[str, Any]]) -> ClientTools:
    """`tools` of a chat completion.

    Raises:
        RequestError: naming the tool and field at fault.
    """
    offered = ClientTools()
    for index, tool in enumerate(tools):
        at = f"tools[{index}]"
        kind = tool.get("type", "function")
        if not isinstance(kind, str):
            raise wrong_value(f"{at}.type", kind, "be the name of a type, 'function' or 'custom'")
        if kind not in ("function", "custom"):
            offered.warnings.append(hosted_tool(kind, at))
            continue
        value = tool.get(kind)
        if not isinstance(value, dict):
            raise wrong_value(f"{at}.{kind}", value, "be an object with the name of the tool")
        if kind == "function":
            check_function(value, f"{at}.function")
            field_name = f"{at}.function.parameters"
            offered.add(ClientTool(function=value, name=value["name"], parameters_at=field_name), at)
        else:
            offered.add(_chat_custom_tool(value, f"{at}.custom"), at)
    return offered


def _chat_custom_tool(value: dict[str, Any], at: str) -> ClientTool:
    form = value.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        inner = form.get("grammar")
        form = {**inner, "type": "grammar"} if isinstance(inner, dict) else form
    return custom_tool(value, form, at, grammar_at=f"{at}.format.grammar")


def chat_tool_use(offered: ClientTools, choice: str | dict[str, Any] | None, parallel: bool | None) -> ToolUse:
    """What `tools`, `tool_choice` and `parallel_tool_calls` of a chat completion mean.

    Raises:
        RequestError: naming the field at fault.
    """
    use = ToolUse.of(offered, parallel=parallel is not False)
    if choice is None:
        return use
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise wrong_value("tool_choice", choice, "be 'none', 'auto', 'required' or the name of a tool as an object")
        use = replace(use, mode=choice)
    else:
        use = _from_object(use, choice)
    check_required(use, choice)
    return use


def _from_object(use: ToolUse, choice: dict[str, Any]) -> ToolUse:
    kind = choice.get("type")
    if kind in ("function", "custom"):
        holder = choice.get(kind)
        return named(use, holder.get("name") if isinstance(holder, dict) else None, f"tool_choice.{kind}.name")
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools")
        if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
            raise wrong_value("tool_choice.allowed_tools", allowed, "hold a mode, 'auto' or 'required', and tools")
        return allow_only(use, allowed.get("tools"), allowed["mode"], "tool_choice.allowed_tools.tools")
    raise wrong_value("tool_choice.type", kind, "be 'function', 'custom' or 'allowed_tools'")


def named(use: ToolUse, name: Any, at: str) -> ToolUse:
    """The use with one tool that must be called. Raises RequestError when it is not offered."""
    names = [tool["function"]["name"] for tool in use.tools]
    if name not in names:
        offered = ", ".join(repr(each) for each in names[:20]) or "none"
        raise wrong_value(at, name, f"name one of the tools; offered: {offered}")
    return replace(use, mode="required", name=name)


def allow_only(use: ToolUse, tools: Any, mode: str, at: str) -> ToolUse:
    """The use with some of the tools only. Raises RequestError when one is not offered."""
    names = []
    for tool in tools if isinstance(tools, list) else [tools]:
        holder = tool.get("function", tool.get("custom", tool)) if isinstance(tool, dict) else {}
        names.append(holder.get("name") if isinstance(holder, dict) else None)
    return allow_names(use, names, mode, at)


def allow_names(use: ToolUse, names: Sequence[Any], mode: str, at: str) -> ToolUse:
    """The use with the tools of these names only. Raises RequestError when one is not offered."""
    by_name = {tool["function"]["name"]: tool for tool in use.tools}
    for name in names:
        if not isinstance(name, str) or name not in by_name:
            raise wrong_value(at, name, "name tools that are offered")
    return replace(use, tools=tuple(by_name[name] for name in dict.fromkeys(names)), mode=mode)
