"""The tools of Anthropic's Messages API: which the client runs, and how the model is shown them.

Custom tools bring their schema; those with a type of Anthropic's that the client runs (`bash_...`, `text_editor_...`,
`memory_...`, `computer_...`) have a published one, whatever date the type bears. What only another server could run is
left out with a warning. Source of the schemas: Anthropic's public API reference. Knows no engine.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from quire_interfaces import wrong_value
from quire_server.client_tools import ClientTool, ClientTools, check_function
from quire_server.request_warnings import RequestWarning, hosted_tool

__all__ = ["deferred_tools", "messages_client_tools"]

_TEXT, _NUMBER, _FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_POINT = {"type": "array", "items": _NUMBER, "minItems": 2, "maxItems": 2}
_SEARCH = "tool_search_tool"
"""Begins the types of the search that Anthropic's server does in tools that are not shown."""


def _object(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _one_of(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names)}


_EDITS = {"path": _TEXT, "view_range": _POINT, "file_text": _TEXT, "old_str": _TEXT, "new_str": _TEXT,
          "insert_line": _NUMBER, "insert_text": _TEXT}  # fmt: skip
_PUBLISHED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bash": (
        "bash",
        "Runs a command in a shell on the user's machine that stays open between calls; restart begins a new one.",
        _object((), command=_TEXT, restart=_FLAG),
    ),
    "text_editor": (
        "str_replace_based_edit_tool",
        "Views, creates and edits text files on the user's machine. str_replace replaces the one place where old_str "
        "stands; insert puts insert_text (in older versions new_str) behind the line insert_line.",
        _object(
            ("command", "path"), command=_one_of("view", "create", "str_replace", "insert", "undo_edit"), **_EDITS
        ),
    ),
    "memory": (
        "memory",
        "Keeps notes in files below /memories, which are there in later conversations too.",
        _object(
            ("command",),
            command=_one_of("view", "create", "str_replace", "insert", "delete", "rename"),
            **_EDITS,
            old_path=_TEXT,
            new_path=_TEXT,
        ),
    ),
    "computer": (
        "computer",
        "Operates the user's computer with mouse and keyboard, and takes pictures of its screen.",
        _object(
            ("action",),
            action=_one_of(
                "key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click",
                "double_click", "triple_click", "left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait",
                "screenshot", "cursor_position", "zoom",
            ),
            coordinate=_POINT,
            start_coordinate=_POINT,
            text=_TEXT,
            scroll_direction=_one_of("up", "down", "left", "right"),
            scroll_amount=_NUMBER,
            duration={"type": "number"},
            region={"type": "array", "items": _NUMBER, "minItems": 4, "maxItems": 4},
        ),
    ),
}  # fmt: skip
"""By the type without its date: name, description and schema."""


def messages_client_tools(tools: Sequence[dict[str, Any]]) -> ClientTools:
    """`tools` of a request.

    Raises:
        RequestError: naming the tool and field at fault.
    """
    offered = ClientTools()
    for index, tool in enumerate(tools):
        at = f"tools[{index}]"
        kind = tool.get("type") or "custom"
        if not isinstance(kind, str):
            raise wrong_value(f"{at}.type", kind, "be the name of a type, such as 'custom'")
        published = _PUBLISHED.get(_without_date(kind))
        if published is not None:
            offered.add(_published_tool(tool, kind, published, at), at)
        elif kind == "custom" or isinstance(tool.get("input_schema"), dict):
            offered.add(_custom_tool(tool, kind, at), at)
        else:
            offered.warnings.append(_left_out(kind, at))
    return offered


def deferred_tools(
    tools: Sequence[dict[str, Any]], found: Sequence[str], described: Sequence[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """Which tools with `defer_loading` the model is not shown with the others: (those that it does not know at all,
    those that the conversation describes to it).

    Args:
        tools: Of the request.
        found: Names that a search by another server has found.
        described: Names that the result of a search by the client holds.
    """
    if any(str(tool.get("type")).startswith(_SEARCH) for tool in tools):
        return frozenset(), frozenset()  # nobody here does the search, so all are shown
    names = {tool["name"] for tool in tools if tool.get("defer_loading") is True and isinstance(tool.get("name"), str)}
    unknown = names & set(described) - set(found)
    return frozenset(names - set(found) - unknown), frozenset(unknown)


def _without_date(kind: str) -> str:
    head, _, date = kind.rpartition("_")
    return head if date.isdigit() else kind


def _custom_tool(tool: dict[str, Any], kind: str, at: str) -> ClientTool:
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {"type": "object"}}
    function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    check_function({**function, "parameters": tool.get("input_schema")}, at)
    return ClientTool(function=function, kind=kind, name=str(function["name"]), parameters_at=f"{at}.input_schema")


def _published_tool(
    tool: dict[str, Any], kind: str, published: tuple[str, str, Mapping[str, Any]], at: str
) -> ClientTool:
    name, description, schema = published
    name = tool.get("name", name)
    width, height = tool.get("display_width_px"), tool.get("display_height_px")
    if isinstance(width, int) and isinstance(height, int):
        description += f" The screen is {width} by {height} pixels; coordinates begin at the top left."
    function = {"name": name, "description": description, "parameters": dict(schema)}
    check_function(function, at)
    return ClientTool(function=function, kind=kind, name=name)


def _left_out(kind: str, at: str) -> RequestWarning:
    if not kind.startswith(_SEARCH):
        return hosted_tool(kind, at)
    message = f"{at} of type {reprlib.repr(kind)} was left out: this server searches no tools, so it shows all of them"
    return RequestWarning(code="tool_left_out", param=at, message=message)
