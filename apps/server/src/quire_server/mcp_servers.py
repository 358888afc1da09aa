"""MCP servers whose tools the server itself calls for requests that ask for it (Model Context Protocol).

Which servers there are is said by the operator alone: a request names one by its label, never an address or a command.
One connection per server, made when it is first needed and made anew after it broke. Needs the package `mcp`
(`pip install 'quire-server[mcp]'`); knows no request and no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import yaml

from quire_interfaces import ConfigError, QuireError

__all__ = ["MCPServer", "MCPToolError", "read_mcp_servers"]

_Work = Callable[[Any], Awaitable[Any]]


class MCPToolError(QuireError):
    """A tool could not be run, or said that it failed."""


class ServerSpec(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One entry of the file: the address of a server over streamable HTTP, with the type "sse" over the older
    transport of events, or a command that speaks over its pipes."""

    type: Literal["stdio", "http", "streamable-http", "sse"] | None = None
    url: str | None = None
    headers: dict[str, str] = {}
    command: str | None = None
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: str | None = None


class _Asked(NamedTuple):
    work: _Work
    answer: asyncio.Future[Any]


def read_mcp_servers(path: str | None, timeout_s: float) -> dict[str, MCPServer]:
    """Label -> server, from a file in the form that MCP hosts share: {"mcpServers": {LABEL: {...}}}, JSON or YAML.

    Raises:
        ConfigError: the file is missing or wrong, or the package is not there.
    """
    if path is None:
        return {}
    try:
        listed = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        specs = msgspec.convert(listed["mcpServers"], dict[str, ServerSpec])
    except (OSError, yaml.YAMLError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"cannot read MCP servers from {path!r}: {error}; it must hold mcpServers, a table from labels to entries "
            "with type, url and headers, or with type, command, args, env and cwd",
            field="mcp_servers",
        ) from None
    for label, spec in specs.items():
        if (spec.url is None) == (spec.command is None):
            raise ConfigError(f"the MCP server {label!r} must have either url or command", field="mcp_servers")
        if spec.type is not None and (spec.type == "stdio") != (spec.url is None):
            raise ConfigError(
                f"the MCP server {label!r} of type {spec.type!r} needs "
                f"{'a command' if spec.type == 'stdio' else 'a url'}",
                field="mcp_servers",
            )
        if spec.headers and spec.url is None:
            raise ConfigError(f"the MCP server {label!r} has headers, which only go with url", field="mcp_servers")
    try:
        import mcp  # noqa: F401
    except ImportError:
        raise ConfigError(
            "MCP servers need the package mcp: pip install 'quire-server[mcp]'", field="mcp_servers"
        ) from None
    return {label: MCPServer(label, spec, timeout_s) for label, spec in specs.items()}


class MCPServer:
    """One server. All calls from one event loop.

    Args:
        label: Its name.
        spec: Where it is.
        timeout_s: A list of tools or a call that takes longer fails.
    """

    def __init__(self, label: str, spec: ServerSpec, timeout_s: float) -> None:
        self.label = label
        self._spec = spec
        self._timeout_s = timeout_s
        self._asked: asyncio.Queue[_Asked] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def list_tools(self) -> list[dict[str, Any]]:
        """The tools with name, description and input_schema.

        Raises:
            MCPToolError: the server is not there, or does not answer in time.
        """

        async def work(client: Any) -> list[dict[str, Any]]:
            tools, cursor = [], None
            while True:
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    break
            return [
                {"name": tool.name, "description": tool.description, "input_schema": tool.input_schema}
                for tool in tools
            ]

        tools: list[dict[str, Any]] = await self._ask(work)
        return tools

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Run a tool; its text.

        Raises:
            MCPToolError: it failed, with what it said.
        """

        async def work(client: Any) -> str:
            result = await client.call_tool(name, arguments)
            text = "\n".join(map(_part_text, result.content))
            if not text and result.structured_content is not None:
                text = msgspec.json.encode(result.structured_content).decode()
            if result.is_error:
                raise MCPToolError(text or "the tool failed and said nothing")
            return text

        text: str = await self._ask(work)
        return text

    async def _ask(self, work: _Work) -> Any:
        if self._task is None or self._task.done():
            self._asked = asyncio.Queue()
            self._task = asyncio.ensure_future(self._serve(self._asked))
            self._task.add_done_callback(_hear)
        asked, serving = _Asked(work, asyncio.get_running_loop().create_future()), self._task
        self._asked.put_nowait(asked)
        try:
            await asyncio.wait((asked.answer, serving), timeout=self._timeout_s, return_when="FIRST_COMPLETED")
            if not asked.answer.done():
                raise MCPToolError(f"the MCP server {self.label!r} {self._why_no_answer(serving)}")
            return asked.answer.result()
        finally:
            asked.answer.cancel()

    def _why_no_answer(self, serving: asyncio.Task[None]) -> str:
        if serving.done():
            error = None if serving.cancelled() else serving.exception()
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            return f"is not there: {error!r}"
        return f"did not answer within {self._timeout_s:g} s"

    async def _serve(self, asked: asyncio.Queue[_Asked]) -> None:
        """Holds the connection: it must be opened and closed by one task."""
        from mcp import Client

        async with contextlib.AsyncExitStack() as held:
            where = await self._where(held)
            client = await held.enter_async_context(Client(where, read_timeout_seconds=self._timeout_s))
            async with asyncio.TaskGroup() as group:
                while True:
                    group.create_task(self._answer(client, await asked.get()))

    async def _where(self, held: contextlib.AsyncExitStack) -> Any:
        """What a client connects to; what must be closed behind it is held."""
        import httpx2  # what the package mcp speaks HTTP with
        from mcp import StdioServerParameters
        from mcp.client.sse import sse_client
        from mcp.client.streamable_http import streamable_http_client

        spec = self._spec
        if spec.url is None:
            return StdioServerParameters(command=spec.command or "", args=spec.args, env=spec.env or None, cwd=spec.cwd)
        if spec.type == "sse":
            return sse_client(spec.url, headers=spec.headers, timeout=self._timeout_s, sse_read_timeout=math.inf)
        if not spec.headers:
            return spec.url
        timeout = httpx2.Timeout(self._timeout_s, read=None)  # the client bounds answers itself
        http = await held.enter_async_context(httpx2.AsyncClient(headers=spec.headers, timeout=timeout))
        return streamable_http_client(spec.url, http_client=http)

    async def _answer(self, client: Any, asked: _Asked) -> None:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            result = await asked.work(client)
        except Exception as error:
            is_answer = isinstance(error, MCPToolError) or (
                isinstance(error, MCPError) and error.code != CONNECTION_CLOSED
            )
            if not is_answer:
                self._task = None  # the next one who asks makes a new connection
            if not asked.answer.done():
                told = error if isinstance(error, MCPToolError) else MCPToolError(f"MCP server {self.label!r}: {error}")
                asked.answer.set_exception(told)
            if not is_answer:
                raise
        else:
            if not asked.answer.done():
                asked.answer.set_result(result)

    async def close(self) -> None:
        """End the connection. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._task
            self._task = None


def _part_text(part: Any) -> str:
    """One part of a tool's output as text; what is none is named, so that the model knows that there was something."""
    if part.type == "text":
        return str(part.text)
    held = getattr(part, "resource", part)
    if isinstance(getattr(held, "text", None), str):
        return str(held.text)
    kind = getattr(held, "mime_type", None) or "no stated type"
    where = f" at {held.uri}" if getattr(held, "uri", None) else ""
    return f"[{part.type} of {kind}{where}: left out, this model reads text only]"


def _hear(task: asyncio.Task[None]) -> None:
    """Why a connection ended is told to those who wait for it."""
    if not task.cancelled():
        task.exception()
