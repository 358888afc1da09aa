"""`tools` and `tool_choice` of the Responses API: which tools the client runs, and which of them a request forces.

Tools that only another server could run are left out with a warning. Knows no items and no engine; the shapes are those
of OpenAI's public API reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire_interfaces import RequestError, wrong_value
from quire_server.builtin_tools import BUILTIN_TOOLS, builtin_tool
from quire_server.client_tools import ClientTool, ClientTools, check_function, check_name, custom_tool
from quire_server.mcp_tools import CODE_INTERPRETER
from quire_server.request_warnings import RequestWarning, hosted_tool
from quire_server.tool_choice import ToolUse, allow_names, check_required, named

__all__ = ["client_tools_of", "responses_tool_use"]

MCPNames = Mapping[str, Mapping[str, str]]
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


def client_tools_of(tools: Sequence[Any], items: Sequence[dict[str, Any]] = ()) -> ClientTools:
    """The client's tools of a request.

    Args:
        tools: `tools` of the request; those that MCP servers run are passed over here.
        items: The conversation, whose tool searches and updates may have brought more tools.

    Raises:
        RequestError: naming the tool and field at fault.
    """
    offered = ClientTools()
    searches = any(tool.get("type") == "tool_search" and builtin_tool(tool) for tool in tools if isinstance(tool, dict))
    for index, tool in enumerate(tools):
        _add(offered, tool, f"tools[{index}]", hides_deferred=searches)
    for index, item in enumerate(items):
        if item.get("type") in ("tool_search_output", "additional_tools") and isinstance(item.get("tools"), list):
            for place, tool in enumerate(item["tools"]):
                at = f"input[{index}].tools[{place}]"
                try:  # what is wrong in a history stays wrong: it must not end the conversation
                    _add(offered, tool, at, hides_deferred=False)
                except RequestError as error:
                    warning = RequestWarning(code="tool_left_out", param=error.param or at, message=str(error))
                    offered.warnings.append(warning)
    return offered


def _add(offered: ClientTools, tool: Any, at: str, *, hides_deferred: bool) -> None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        raise wrong_value(f"{at}.type", kind, "be the type of a tool")
    if kind in ("mcp", CODE_INTERPRETER) or (hides_deferred and tool.get("defer_loading") is True):
        return
    if kind == "namespace":
        _add_namespace(offered, tool, at, hides_deferred=hides_deferred)
    elif kind in _MAKERS:
        offered.add(_MAKERS[kind](tool, at, None), at)
    elif (built_in := builtin_tool(tool)) is not None:
        offered.add(built_in, at)
    else:
        offered.warnings.append(hosted_tool(kind, at))


def _add_namespace(offered: ClientTools, group: dict[str, Any], at: str, *, hides_deferred: bool) -> None:
    name, tools, description = group.get("name"), group.get("tools"), group.get("description")
    check_name(name, at)
    if not isinstance(tools, list):
        raise wrong_value(f"{at}.tools", tools, "be a list of tools")
    for index, tool in enumerate(tools):
        place = f"{at}.tools[{index}]"
        kind = tool.get("type", "function") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise wrong_value(f"{place}.type", kind, "be the type of a tool")
        if hides_deferred and (tool.get("defer_loading") is True or group.get("defer_loading") is True):
            continue
        if kind not in _MAKERS:
            offered.warnings.append(hosted_tool(kind, place))
            continue
        client_tool = _MAKERS[kind](tool, place, name)
        if index == 0 and description:
            text = f"{client_tool.function.get('description') or ''}\n\nAll tools of {name}: {description}".strip()
            client_tool = replace(client_tool, function={**client_tool.function, "description": text})
        offered.add(client_tool, place)


def _function(tool: dict[str, Any], at: str, namespace: str | None) -> ClientTool:
    function = {key: tool[key] for key in _FUNCTION_FIELDS if tool.get(key) is not None}
    check_function(function, at)
    return ClientTool(function=function, name=function["name"], namespace=namespace)


def _custom(tool: dict[str, Any], at: str, namespace: str | None) -> ClientTool:
    return custom_tool(tool, tool.get("format"), at, namespace=namespace, grammar_at=f"{at}.format")


_MAKERS: dict[str, Callable[[dict[str, Any], str, str | None], ClientTool]] = {"function": _function, "custom": _custom}


def responses_tool_use(
    offered: ClientTools,
    mcp_names: MCPNames,
    mcp_tools: Sequence[dict[str, Any]],
    choice: str | dict[str, Any] | None,
    *,
    parallel: bool,
) -> ToolUse:
    """What `tools`, `tool_choice` and `parallel_tool_calls` mean.

    Args:
        offered: The client's tools.
        mcp_names: Label of an MCP server -> names of its tools -> what the model knows them by.
        mcp_tools: These tools in the chat API's form.
        choice: `tool_choice`.
        parallel: Whether one answer may hold several calls.

    Raises:
        RequestError: naming the field at fault.
    """
    use = ToolUse.of(offered, mcp_tools, parallel=parallel)
    if choice is None:
        return use
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise wrong_value("tool_choice", choice, "be none, auto, required, or an object that names a tool")
        use = replace(use, mode=choice)
    elif choice.get("type") == "allowed_tools":
        use = _allowed(use, mcp_names, choice)
    else:
        names = _names_of(use, mcp_names, choice, "tool_choice")
        use = (
            named(use, names[0], "tool_choice")
            if len(names) == 1
            else allow_names(use, names, "required", "tool_choice")
        )
    check_required(use, choice)
    return use


def _allowed(use: ToolUse, mcp_names: MCPNames, choice: dict[str, Any]) -> ToolUse:
    """`allowed_tools`. Tools that were left out may be allowed: nobody calls them."""
    mode, tools = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise wrong_value("tool_choice.mode", mode, "be auto or required")
    if not isinstance(tools, list):
        raise wrong_value("tool_choice.tools", tools, "be a list of tools")
    names: list[str] = []
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise wrong_value(f"tool_choice.tools[{index}]", tool, "be an object that names a tool")
        if _is_known(tool):
            names += _names_of(use, mcp_names, tool, f"tool_choice.tools[{index}]")
    return allow_names(use, names, mode, "tool_choice.tools")


def _is_known(tool: dict[str, Any]) -> bool:
    kind = tool.get("type", "function")
    known = (*_MAKERS, *BUILTIN_TOOLS, "namespace", "mcp", CODE_INTERPRETER)
    return not isinstance(kind, str) or kind in known


def _names_of(use: ToolUse, mcp_names: MCPNames, tool: dict[str, Any], at: str) -> list[str]:
    """Shown names of the tools that an object names."""
    kind, name = tool.get("type", "function"), tool.get("name")
    if not isinstance(kind, str):
        raise wrong_value(f"{at}.type", kind, "be the type of a tool")
    if kind in _MAKERS:
        if not isinstance(name, str):
            raise wrong_value(f"{at}.name", name, "be the name of a tool")
        found = use.offered.find(name, tool.get("namespace"))
        shown = [each for own in mcp_names.values() for each in own.items() if name in each]
        names = [found] if found is not None else [each for _, each in shown]
        at = f"{at}.name"
    elif kind == "namespace":
        names = use.offered.of_namespace(name) if name is not None else []
    elif kind in ("mcp", CODE_INTERPRETER):
        label = tool.get("server_label") if kind == "mcp" else CODE_INTERPRETER
        own = mcp_names.get(label, {}) if isinstance(label, str) else {}
        names = [each for own_name, each in own.items() if name in (None, own_name)]
    else:
        kinds = ("computer", "computer_use_preview") if kind.startswith("computer") else (kind,)
        found = use.offered.find(None, None, kinds)
        names = [] if found is None else [found]
    if not names:
        offered = ", ".join(repr(each["function"]["name"]) for each in use.tools[:20]) or "none"
        raise wrong_value(at, tool, f"name one of the tools that can be called; offered: {offered}")
    return names
