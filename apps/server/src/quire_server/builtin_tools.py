"""Tools of the Responses API that have a type of their own and are run by the client: shells, patches, computers.

Each is a row of a table: what the model is shown, and how its arguments become the item of the call and back. The
shapes of the items are those of OpenAI's public API reference. Knows no other tools.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire_server.client_tools import ClientTool

__all__ = ["BUILTIN_BY_ITEM", "BUILTIN_TOOLS", "BuiltinTool", "builtin_tool"]

Fields = dict[str, Any]

_TEXT, _NUMBER, _TEXTS = {"type": "string"}, {"type": "integer"}, {"type": "array", "items": {"type": "string"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinTool:
    """One type of tool."""

    name: str
    """What the model calls."""
    item: str
    """Type of the item of a call; with `_output` behind it, of its result."""
    description: str
    properties: dict[str, Any]
    required: tuple[str, ...]
    fields: Callable[[Fields], Fields]
    """From the model's arguments to the fields of the item."""
    arguments: Callable[[Fields], Any]
    """From the item to the arguments."""
    can_be_incomplete: bool = True
    """Whether the item's status may be "incomplete"."""


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [each if isinstance(each, str) else json.dumps(each) for each in value] if isinstance(value, list) else []


def _shell_action(arguments: Fields) -> Fields:
    commands = _texts(arguments.get("commands", arguments.get("command")))
    limits = {name: arguments.get(name) for name in ("timeout_ms", "max_output_length")}
    return {"action": {"commands": commands, **limits}}


def _local_shell_action(arguments: Fields) -> Fields:
    command = arguments.get("command", arguments.get("commands"))
    words = ["bash", "-lc", command] if isinstance(command, str) else _texts(command)
    others = {name: arguments.get(name) for name in ("timeout_ms", "user", "working_directory")}
    env = arguments.get("env")
    return {"action": {"type": "exec", "command": words, "env": env if isinstance(env, dict) else {}, **others}}


def _operation(arguments: Fields) -> Fields:
    kind = arguments.get("type")
    operation = {"type": kind if kind in _OPERATIONS else "update_file", "path": str(arguments.get("path") or "")}
    if operation["type"] != "delete_file":
        operation["diff"] = str(arguments.get("diff") or "")
    return {"operation": operation}


def _computer_actions(arguments: Fields) -> Fields:
    actions = arguments.get("actions", arguments)
    actions = [each for each in (actions if isinstance(actions, list) else [actions]) if isinstance(each, dict)]
    return {"actions": actions, "pending_safety_checks": []}


def _computer_action(arguments: Fields) -> Fields:
    return {"action": arguments, "pending_safety_checks": []}


_OPERATIONS = ("create_file", "update_file", "delete_file")
_ACTION = {
    "type": {"type": "string", "enum": [
        "click", "double_click", "drag", "keypress", "move", "screenshot", "scroll", "type", "wait",
    ]},
    "x": _NUMBER, "y": _NUMBER, "button": {"type": "string", "enum": ["left", "right", "wheel", "back", "forward"]},
    "scroll_x": _NUMBER, "scroll_y": _NUMBER, "keys": _TEXTS, "text": _TEXT,
    "path": {"type": "array", "items": {"type": "object", "properties": {"x": _NUMBER, "y": _NUMBER}}},
}  # fmt: skip

BUILTIN_TOOLS: dict[str, BuiltinTool] = {
    "shell": BuiltinTool(
        name="shell",
        item="shell_call",
        description="Runs shell commands on the user's machine and returns what they print.",
        properties={"commands": _TEXTS, "timeout_ms": _NUMBER, "max_output_length": _NUMBER},
        required=("commands",),
        fields=_shell_action,
        arguments=lambda item: _arguments(item.get("action")),
    ),
    "local_shell": BuiltinTool(
        name="local_shell",
        item="local_shell_call",
        description="Runs one command, a program with its arguments, on the user's machine.",
        properties={"command": _TEXTS, "working_directory": _TEXT, "env": {"type": "object"}, "timeout_ms": _NUMBER},
        required=("command",),
        fields=_local_shell_action,
        arguments=lambda item: _arguments(item.get("action"), "type"),
    ),
    "apply_patch": BuiltinTool(
        name="apply_patch",
        item="apply_patch_call",
        description="Creates, updates or deletes one file. diff is in the V4A format: without line numbers, with @@ "
        "before each part and ' ', '-' or '+' before each line.",
        properties={"type": {"type": "string", "enum": list(_OPERATIONS)}, "path": _TEXT, "diff": _TEXT},
        required=("type", "path"),
        fields=_operation,
        arguments=lambda item: _arguments(item.get("operation")),
        can_be_incomplete=False,
    ),
    "computer": BuiltinTool(
        name="computer",
        item="computer_call",
        description="Operates a computer: does actions with mouse and keyboard, one after the other.",
        properties={"actions": {"type": "array", "items": {"type": "object", "properties": _ACTION}}},
        required=("actions",),
        fields=_computer_actions,
        arguments=lambda item: {"actions": item.get("actions") or [item.get("action") or {}]},
    ),
    "computer_use_preview": BuiltinTool(
        name="computer",
        item="computer_call",
        description="Operates a computer: does one action with mouse or keyboard.",
        properties=_ACTION,
        required=("type",),
        fields=_computer_action,
        arguments=lambda item: _arguments(item.get("action")),
    ),
    "tool_search": BuiltinTool(
        name="tool_search",
        item="tool_search_call",
        description="Finds more tools, which can be called afterwards.",
        properties={"query": _TEXT},
        required=(),
        fields=lambda arguments: {"arguments": arguments, "execution": "client"},
        arguments=lambda item: item.get("arguments"),
    ),
}
"""By the type of the tool."""
BUILTIN_BY_ITEM: dict[str, BuiltinTool] = {tool.item: tool for tool in reversed(BUILTIN_TOOLS.values())}
"""By the type of a call's item; a computer's with all its actions."""


def builtin_tool(tool: dict[str, Any]) -> ClientTool | None:
    """A tool of such a type; None for what the client does not run: shells in containers, search by the server."""
    kind = str(tool.get("type"))
    built_in = BUILTIN_TOOLS.get(kind)
    if built_in is None or not _is_run_by_client(tool):
        return None
    parameters: dict[str, Any] = {
        "type": "object", "properties": built_in.properties, "required": list(built_in.required),
    }  # fmt: skip
    description = built_in.description
    if kind == "tool_search":
        description = str(tool.get("description") or description)
        parameters = tool["parameters"] if isinstance(tool.get("parameters"), dict) else parameters
    function = {"name": built_in.name, "description": description, "parameters": parameters}
    return ClientTool(function=function, kind=kind, name=built_in.name)


def _is_run_by_client(tool: dict[str, Any]) -> bool:
    if tool["type"] == "tool_search":
        return tool.get("execution") == "client"
    environment = tool.get("environment")
    return tool["type"] != "shell" or not isinstance(environment, dict) or environment.get("type") == "local"


def _arguments(value: Any, *without: str) -> Fields:
    """The fields of an item's object, without those that say nothing."""
    if not isinstance(value, dict):
        return {}
    return {key: each for key, each in value.items() if each is not None and key not in without}
