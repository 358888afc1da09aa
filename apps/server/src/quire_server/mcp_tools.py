"""The MCP tools of one response: which there are, which calls are theirs, and running these.

Translates `tools` of type "mcp" of the Responses API. Knows no engine.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire_interfaces import RequestError
from quire_server.mcp_servers import MCPServer, MCPToolError, shortened
from quire_server.request_warnings import RequestWarning

__all__ = ["MAX_CALLS", "MCPTools", "longest_result", "shorten_results"]

MAX_CALLS = 32
"""Calls in one response, where the request does not say max_tool_calls."""


class MCPTools:
    """Tools of MCP servers that one request asked for."""

    def __init__(self) -> None:
        self.lists: list[dict[str, Any]] = []
        """One `mcp_list_tools` item per server."""
        self.warnings: list[RequestWarning] = []
        """Servers that are not configured here, and so were left out."""
        self._server_of: dict[str, MCPServer] = {}
        self._asks: set[str] = set()

    @classmethod
    async def of(
        cls, tools: Sequence[dict[str, Any]], servers: Mapping[str, MCPServer], taken: Sequence[str]
    ) -> MCPTools:
        """The tools of the "mcp" entries in a request.

        Args:
            tools: `tools` of the request.
            servers: Those that the operator named.
            taken: Names of the request's own functions.

        Raises:
            RequestError: naming the entry at fault.
        """
        own = cls()
        for index, tool in enumerate(tools):
            if tool.get("type") == "mcp":
                await own._add(tool, f"tools[{index}]", servers, taken)
        return own

    async def _add(self, tool: dict[str, Any], at: str, servers: Mapping[str, MCPServer], taken: Sequence[str]) -> None:
        label = tool.get("server_label")
        if not isinstance(label, str):
            raise RequestError(f"{at}.server_label must be the name of an MCP server", param=f"{at}.server_label")
        if label not in servers:
            known = ", ".join(sorted(servers)) or "none"
            message = (
                f"{at} was left out: there is no MCP server {label[:100]!r} in this server's configuration "
                f"(--mcp-servers); named: {known}"
            )
            self.warnings.append(RequestWarning(code="tool_left_out", param=at, message=message))
            return
        if tool.get("server_url") is not None or tool.get("connector_id") is not None:
            raise RequestError(
                f"{at}.server_url and connector_id are not taken from requests; the label says which server it is",
                param=f"{at}.server_url",
            )
        server = servers[label]
        try:
            listed = await server.list_tools()
        except MCPToolError as error:
            raise RequestError(str(error), param=at, code="mcp_server_unavailable") from None
        wanted = _allowed(tool.get("allowed_tools"), [each["name"] for each in listed], f"{at}.allowed_tools")
        listed = [each for each in listed if each["name"] in wanted]
        self._asks |= _asking(tool.get("require_approval"), wanted, f"{at}.require_approval")
        for each in listed:
            if each["name"] in taken or each["name"] in self._server_of:
                raise RequestError(
                    f"{at} has a tool {each['name']!r}, and another tool of this request has the same name; leave one "
                    "of them out with allowed_tools",
                    param=at,
                )
            self._server_of[each["name"]] = server
        item = {"type": "mcp_list_tools", "server_label": label, "tools": listed}
        self.lists.append({"id": f"mcpl_{secrets.token_hex(12)}", **item})

    def chat_tools(self) -> list[dict[str, Any]]:
        """The tools in the chat API's form."""
        return [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool["description"] or "",
                    "parameters": tool["input_schema"],
                },
            }
            for item in self.lists
            for tool in item["tools"]
        ]

    def names_by_label(self) -> dict[str, list[str]]:
        """Label of each server -> names of its tools."""
        return {item["server_label"]: [tool["name"] for tool in item["tools"]] for item in self.lists}

    def label_of(self, name: str) -> str | None:
        """The server of a tool; None for what is the client's to call."""
        server = self._server_of.get(name)
        return None if server is None else server.label

    def asks_before(self, name: str) -> bool:
        """Whether a call of this tool waits for somebody's approval."""
        return name in self._asks

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
            asked = requests[name]
            if self.label_of(str(asked.get("name"))) != asked.get("server_label"):
                raise RequestError(
                    f"{at} approves a call of {str(asked.get('name'))[:100]!r}, which is not among the tools of this "
                    "request: send the same tools again",
                    param=at,
                )
            calls.append({"approval_request_id": name, **{key: asked[key] for key in _CALL}})
        return calls

    async def run(self, calls: Sequence[dict[str, Any]]) -> None:
        """Run calls side by side; each item gets its output, or its error and the status failed."""
        await asyncio.gather(*map(self._run, calls))

    async def _run(self, call: dict[str, Any]) -> None:
        try:
            arguments = msgspec.json.decode(call["arguments"] or "{}", type=dict[str, Any])
            call["output"] = await self._server_of[call["name"]].call(call["name"], arguments)
            call["status"] = "completed"
        except (MCPToolError, msgspec.DecodeError) as error:
            call["error"] = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": str(error)}]}
            call["status"] = "failed"


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


def _result(call: dict[str, Any]) -> str:
    if call["status"] == "completed":
        return str(call["output"])
    return "".join(part["text"] for part in call["error"].get("content", ()))


_CALL = ("server_label", "name", "arguments")


def _asking(wanted: Any, names: Sequence[str], at: str) -> set[str]:
    """`require_approval`: "always" (also when it is left out), "never", or an object that says which tools are which;
    those that it does not name wait for approval."""
    if wanted in (None, "always"):
        return set(names)
    if wanted == "never":
        return set()
    if not isinstance(wanted, dict) or not set(wanted) <= {"always", "never"}:
        raise RequestError(
            f"{at} must be 'always', 'never', or an object with the tool_names of always and never", param=at
        )
    always, never = (
        _allowed(wanted.get(key), list(names), f"{at}.{key}") if wanted.get(key) is not None else []
        for key in ("always", "never")
    )
    return (set(names) - set(never)) | set(always)


def _allowed(wanted: Any, names: list[str], at: str) -> list[str]:
    """`allowed_tools`: a list of names, or an object with one."""
    if isinstance(wanted, dict):
        wanted = wanted.get("tool_names")
    if wanted is None:
        return names
    if not isinstance(wanted, list) or not all(isinstance(name, str) for name in wanted):
        raise RequestError(f"{at} must be a list of names", param=at)
    missing = [name for name in wanted if name not in names]
    if missing:
        raise RequestError(
            f"{at} names {missing[0][:100]!r}, which the server does not have; it has: {', '.join(names)[:500]}",
            param=at,
        )
    return wanted
