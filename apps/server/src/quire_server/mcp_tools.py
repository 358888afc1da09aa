"""The MCP tools of one response: which there are, which calls are theirs, and running these.

Translates `tools` of the types "mcp" and "code_interpreter" of the Responses API. Knows no engine.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from quire_interfaces import RequestError
from quire_server.client_tools import SEPARATOR, is_name
from quire_server.mcp_servers import MCPServer, MCPToolError, shortened
from quire_server.request_warnings import RequestWarning, field_left_out, hosted_tool

__all__ = [
    "CODE_INTERPRETER",
    "MAX_CALLS",
    "MCPTool",
    "MCPTools",
    "failed_call",
    "longest_result",
    "shorten_results",
    "tell_item",
]

CODE_INTERPRETER = "code_interpreter"
"""Type of a tool, and label of the server that is called for it."""
MAX_SCHEMA_BYTES = 1 << 16
"""Longest schema of a tool's parameters that a model is shown."""
MAX_DESCRIPTION_CHARS = 10_000
MAX_CALLS = 32
"""Calls in one response, where the request does not say max_tool_calls."""


class MCPTool(NamedTuple):
    """A tool of an MCP server, as one request may use it."""

    server: MCPServer
    name: str
    """What its server calls it."""
    asks_before: bool
    """Whether a call waits for somebody's approval."""
    is_interpreter: bool = False
    """Whether its calls are items of the code interpreter: it takes a program as `code`."""

    @property
    def label(self) -> str:
        return self.server.label


class MCPTools:
    """Tools of MCP servers that one request asked for."""

    def __init__(self) -> None:
        self.lists: list[dict[str, Any]] = []
        """One `mcp_list_tools` item per server."""
        self.warnings: list[RequestWarning] = []
        """Servers and tools that were left out."""
        self._tools: dict[tuple[str, str], MCPTool] = {}
        """By label of the server and its name for the tool."""
        self._shown_names: dict[tuple[str, str], str] = {}
        self._by_shown_name: dict[str, MCPTool] = {}
        self._interpreter: tuple[str, str] | None = None
        """Key of the tool that runs programs for the code interpreter."""

    @classmethod
    async def of(
        cls, tools: Sequence[dict[str, Any]], servers: Mapping[str, MCPServer], taken: Sequence[str]
    ) -> MCPTools:
        """The tools of the "mcp" entries in a request, and of its code interpreter.

        Args:
            tools: `tools` of the request.
            servers: Those that the operator named.
            taken: Names of the request's own functions.

        Raises:
            RequestError: naming the entry at fault.
        """
        own = cls()
        for index, tool in enumerate(tools):
            at = f"tools[{index}]"
            if tool.get("type") == "mcp":
                await own._add(tool, at, servers)
            elif tool.get("type") == CODE_INTERPRETER:
                await own._add_code_interpreter(tool, at, servers)
        own._choose_names(taken)
        return own

    async def _add_code_interpreter(self, tool: dict[str, Any], at: str, servers: Mapping[str, MCPServer]) -> None:
        """The tools of the server that the operator named for it; its calls wait for nobody's approval, as OpenAI's."""
        if CODE_INTERPRETER not in servers:
            self.warnings.append(hosted_tool(CODE_INTERPRETER, at))
            return
        container = tool.get("container")
        if not isinstance(container, dict) or container.get("file_ids"):
            why = "programs have no files of other containers; what they need must stand in them"
            self.warnings.append(field_left_out(f"{at}.container", why))
        await self._add({"server_label": CODE_INTERPRETER, "require_approval": "never"}, at, servers)
        for tool in self.lists[-1]["tools"]:
            key = (CODE_INTERPRETER, tool["name"])
            if self._interpreter is None and "code" in (tool["input_schema"].get("properties") or {}):
                self._interpreter, self._tools[key] = key, self._tools[key]._replace(is_interpreter=True)

    async def _add(self, tool: dict[str, Any], at: str, servers: Mapping[str, MCPServer]) -> None:
        label = tool.get("server_label")
        if not isinstance(label, str):
            raise RequestError(f"{at}.server_label must be the name of an MCP server", param=f"{at}.server_label")
        if label not in servers:
            labels = ", ".join(sorted(servers)) or "none"
            message = (
                f"{at} was left out: there is no MCP server {label[:100]!r} in this server's configuration "
                f"(--mcp-servers); named: {labels}"
            )
            self.warnings.append(RequestWarning(code="tool_left_out", param=at, message=message))
            return
        if tool.get("server_url") is not None or tool.get("connector_id") is not None:
            raise RequestError(
                f"{at}.server_url and connector_id are not taken from requests; the label says which server it is",
                param=f"{at}.server_url",
            )
        try:
            listed = self._usable(await servers[label].list_tools(), at)
        except MCPToolError as error:
            raise RequestError(str(error), param=at, code="mcp_server_unavailable") from None
        allowed = _allowed(tool.get("allowed_tools"), [each["name"] for each in listed], f"{at}.allowed_tools")
        asking = _asking(tool.get("require_approval"), allowed, f"{at}.require_approval")
        listed = [each for each in listed if each["name"] in allowed and (label, each["name"]) not in self._tools]
        for each in listed:
            self._tools[label, each["name"]] = MCPTool(servers[label], each["name"], each["name"] in asking)
        for name in asking:  # an entry that names a server again may only ask more
            self._tools[label, name] = self._tools[label, name]._replace(asks_before=True)
        item = {"type": "mcp_list_tools", "server_label": label, "tools": listed}
        self.lists.append({"id": f"mcpl_{secrets.token_hex(12)}", **item})

    def _usable(self, listed: Sequence[dict[str, Any]], at: str) -> list[dict[str, Any]]:
        """Tools of a server that a model can be shown, each name once; what is too long of the others is left out."""
        usable: dict[str, dict[str, Any]] = {}
        for tool in listed:
            name, description = str(tool["name"]), tool["description"] or ""
            if not is_name(name) or len(msgspec.json.encode(tool["input_schema"])) > MAX_SCHEMA_BYTES:
                message = (
                    f"the tool {name[:100]!r} of {at} was left out: it has a name that is none, or a schema of more "
                    f"than {MAX_SCHEMA_BYTES} bytes"
                )
                self.warnings.append(RequestWarning(code="tool_left_out", param=at, message=message))
                continue
            if len(description) > MAX_DESCRIPTION_CHARS:
                tool = {**tool, "description": f"{description[:MAX_DESCRIPTION_CHARS]} [...]"}
            usable.setdefault(name, tool)
        return list(usable.values())

    def _choose_names(self, taken: Sequence[str]) -> None:
        """What the model is shown: a tool's own name, behind the label of its server where another tool of the request
        has the same one."""
        counts = Counter([*taken, *(name for _, name in self._tools)])
        used = {name for name, _ in counts.items() if counts[name] == 1 or name in taken}
        for (label, name), tool in self._tools.items():
            shown_name = name
            if counts[name] > 1:
                joined = shown_name = f"{_NO_NAME.sub('_', label)}{SEPARATOR}{name}"
                number = 1
                while shown_name in used:
                    number += 1
                    shown_name = f"{joined}_{number}"
                used.add(shown_name)
            self._shown_names[label, name] = shown_name
            self._by_shown_name[shown_name] = tool

    def chat_tools(self) -> list[dict[str, Any]]:
        """The tools in the chat API's form."""
        return [
            {
                "type": "function",
                "function": {
                    "name": self._shown_names[item["server_label"], tool["name"]],
                    "description": tool["description"] or "",
                    "parameters": tool["input_schema"],
                },
            }
            for item in self.lists
            for tool in item["tools"]
        ]

    def names_by_label(self) -> dict[str, dict[str, str]]:
        """Label of each server -> names of its tools -> what the model knows them by."""
        names: dict[str, dict[str, str]] = {item["server_label"]: {} for item in self.lists}
        for (label, name), shown_name in self._shown_names.items():
            names[label][name] = shown_name
        return names

    @property
    def told_lists(self) -> list[dict[str, Any]]:
        """Those of `lists` that clients are told: OpenAI's code interpreter has none."""
        own = CODE_INTERPRETER if self._interpreter is not None else None
        return [item for item in self.lists if item["server_label"] != own]

    @property
    def interpreter_name(self) -> str | None:
        """How the model knows the tool that runs programs; None where there is none."""
        return None if self._interpreter is None else self._shown_names[self._interpreter]

    def get(self, shown_name: str) -> MCPTool | None:
        """The tool that a model calls by this name; None for what is the client's to call."""
        return self._by_shown_name.get(shown_name)

    def shown_name(self, label: Any, name: str) -> str | None:
        """How the model knows a tool of a server; None for one that is not offered (any more)."""
        return self._shown_names.get((label, name)) if isinstance(label, str) else None

    def approved(self, items: Sequence[dict[str, Any]], earlier: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Calls that new items approve and that were not run yet, as `mcp_call` items.

        Args:
            items: The new input.
            earlier: What was said before.

        Raises:
            RequestError: naming the item at fault.
        """
        everything = [*earlier, *items]
        requests = {item.get("id"): item for item in everything if item.get("type") == "mcp_approval_request"}
        ran = {item.get("approval_request_id") for item in everything if item.get("type") == "mcp_call"}
        calls = []
        for index, item in enumerate(items):
            if item.get("type") != "mcp_approval_response":
                continue
            name, at = item.get("approval_request_id"), f"input[{index}]"
            if not isinstance(name, str) or name not in requests:
                raise RequestError(
                    f"{at}.approval_request_id must be the id of an mcp_approval_request of this conversation, got "
                    f"{str(name)[:100]!r}",
                    param=f"{at}.approval_request_id",
                )
            if not isinstance(item.get("approve"), bool):
                raise RequestError(f"{at}.approve must be true or false", param=f"{at}.approve")
            if not item["approve"] or name in ran:
                continue
            ran.add(name)
            call = requests[name]
            if self.shown_name(call.get("server_label"), str(call.get("name"))) is None:
                raise RequestError(
                    f"{at} approves a call of {str(call.get('name'))[:100]!r}, which is not among the tools of this "
                    "request: send the same tools again",
                    param=at,
                )
            calls.append({"approval_request_id": name, **{key: call[key] for key in _CALL}})
        return calls

    async def run(self, calls: Sequence[dict[str, Any]]) -> None:
        """Run calls side by side; each item gets its output, or its error and the status failed."""
        await asyncio.gather(*map(self.run_one, calls))

    async def run_one(self, call: dict[str, Any]) -> None:
        """Run one call; its item gets what came of it."""
        try:
            arguments = msgspec.json.decode(call["arguments"] or "{}", type=dict[str, Any])
            tool = self._tools[call["server_label"], call["name"]]
            call["output"] = await tool.server.call(tool.name, arguments)
            call["status"] = "completed"
        except (MCPToolError, msgspec.DecodeError) as error:
            call |= failed_call(str(error))
        tell_item(call)


def failed_call(message: str) -> dict[str, Any]:
    """What an `mcp_call` item gets for a call that gave nothing."""
    content = [{"type": "text", "text": message}]
    return {"error": {"type": "mcp_tool_execution_error", "content": content}, "status": "failed"}


def tell_item(call: dict[str, Any]) -> None:
    """Write what came of a call into its `item`, where it has one (`interpreter_call`)."""
    if (item := call.get("item")) is not None:
        text = _result(call) or str((call.get("error") or {}).get("message", ""))
        item |= {"status": call["status"], "outputs": [{"type": "logs", "logs": text}]}


def longest_result(calls: Sequence[dict[str, Any]]) -> int:
    """Characters of the longest result of calls that ran."""
    return max((len(_result(call)) for call in calls), default=0)


def shorten_results(calls: Sequence[dict[str, Any]], max_chars: int) -> None:
    """Leave the beginnings of results that are longer, in place; the model is told that they are longer."""
    for call in calls:
        text = _result(call)
        if len(text) <= max_chars:
            continue
        if call["status"] == "completed":
            call["output"] = shortened(text, max_chars)
        else:
            call["error"]["content"] = [{"type": "text", "text": shortened(text, max_chars)}]
        tell_item(call)


def _result(call: dict[str, Any]) -> str:
    if call["status"] == "completed":
        return str(call["output"])
    return "".join(part["text"] for part in call["error"].get("content", ()))


_NO_NAME = re.compile(r"[^\w.-]")
"""What a label has that a tool's name must not."""
_CALL = ("server_label", "name", "arguments")


def _asking(setting: Any, names: Sequence[str], at: str) -> set[str]:
    """`require_approval`: "always" (also when it is left out), "never", or an object that says which tools are which;
    those that it does not name wait for approval."""
    if setting in (None, "always"):
        return set(names)
    if setting == "never":
        return set()
    if not isinstance(setting, dict) or not set(setting) <= {"always", "never"}:
        raise RequestError(
            f"{at} must be 'always', 'never', or an object with the tool_names of always and never", param=at
        )
    always, never = (
        _allowed(setting.get(key), list(names), f"{at}.{key}") if setting.get(key) is not None else []
        for key in ("always", "never")
    )
    return (set(names) - set(never)) | set(always)


def _allowed(setting: Any, names: list[str], at: str) -> list[str]:
    """`allowed_tools`: a list of names, or an object with one."""
    if isinstance(setting, dict):
        setting = setting.get("tool_names")
    if setting is None:
        return names
    if not isinstance(setting, list) or not all(isinstance(name, str) for name in setting):
        raise RequestError(f"{at} must be a list of names", param=at)
    missing = [name for name in setting if name not in names]
    if missing:
        raise RequestError(
            f"{at} names {missing[0][:100]!r}, which the server does not have; it has: {', '.join(names)[:500]}",
            param=at,
        )
    return setting
