"""MCP servers whose tools the server itself calls for requests that ask for it (Model Context Protocol).

Which servers there are is said by the operator alone: a request names one by its label, never an address or a command.
One connection per server, made when it is first needed and made anew after it broke or did not answer in time. What a
server gives is bounded, however much it writes (`mcp_relay.py` for those over pipes). Needs the package `mcp`
(`pip install 'quire-server[mcp]'`); knows no request and no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import re
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import yaml

from quire_interfaces import ConfigError, QuireError
from quire_observability import span
from quire_server import mcp_relay
from quire_server.log_pipe import log_pipe

__all__ = ["MAX_RESULT_CHARS", "MCPServer", "MCPToolError", "read_mcp_servers", "shortened"]

_logger = logging.getLogger(__name__)

_Work = Callable[[Any], Awaitable[Any]]

MAX_TOOLS = 1000
"""Most tools of one server."""
MAX_PAGES = 100
MAX_ANSWER_BYTES = 4 << 20
"""Longest message of a server, and most bytes of its list of tools."""
MAX_RESULT_CHARS = 200_000
"""Most text of one result that the model is given."""


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


class _Question(NamedTuple):
    work: _Work
    answer: asyncio.Future[Any]


class _Connection:
    """A task that holds a connection, and what it is asked to do."""

    def __init__(self, serve: Callable[[_Connection], Coroutine[Any, Any, None]]) -> None:
        self.questions: asyncio.Queue[_Question] = asyncio.Queue()
        self.num_waiting = 0
        """Callers that wait for an answer."""
        self.is_retired = False
        """Whether it is closed as soon as nobody waits for it."""
        self.task = asyncio.ensure_future(serve(self))
        self.task.add_done_callback(_hear)

    def end(self) -> None:
        """Close it, once: whoever is cancelled while closing leaves the server's process behind."""
        if not self.task.cancelling():
            self.task.cancel()


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
    # What fails is told to those who wait for it; a server that writes nonsense would fill the log.
    logging.getLogger("mcp").setLevel(logging.CRITICAL)
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
        self._connection: _Connection | None = None
        self._retired: set[_Connection] = set()

    async def list_tools(self) -> list[dict[str, Any]]:
        """The tools with name, description and input_schema.

        Raises:
            MCPToolError: the server is not there, or does not answer in time.
        """

        async def work(client: Any) -> list[dict[str, Any]]:
            tools: list[dict[str, Any]] = []
            num_bytes, cursor = 0, None
            for _ in range(MAX_PAGES):
                page = await client.list_tools(cursor=cursor)
                listed = [
                    {"name": tool.name, "description": tool.description, "input_schema": tool.input_schema}
                    for tool in page.tools
                ]
                num_bytes += len(msgspec.json.encode(listed))
                tools += listed
                cursor = page.next_cursor
                if len(tools) > MAX_TOOLS or num_bytes > MAX_ANSWER_BYTES:
                    break
                if cursor is None:
                    return tools
            raise MCPToolError(
                f"the MCP server {self.label!r} lists more than {MAX_TOOLS} tools, {MAX_PAGES} pages or "
                f"{MAX_ANSWER_BYTES} bytes; offer fewer there"
            )

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
                raise MCPToolError(shortened(text, MAX_RESULT_CHARS) or "the tool failed and said nothing")
            return shortened(text, MAX_RESULT_CHARS)

        attributes = {
            "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name, "gen_ai.tool.type": "extension",
            "server.address": self.label,
        }  # fmt: skip
        with span(f"execute_tool {name}", attributes):
            text: str = await self._ask(work)
        return text

    async def _ask(self, work: _Work) -> Any:
        connection = self._connection
        if connection is None or connection.task.done():
            connection = self._connection = _Connection(self._serve)
        question = _Question(work, asyncio.get_running_loop().create_future())
        connection.questions.put_nowait(question)
        connection.num_waiting += 1
        try:
            waited = (question.answer, connection.task)
            await asyncio.wait(waited, timeout=self._timeout_s, return_when="FIRST_COMPLETED")
            if not question.answer.done():
                self._retire(connection)
                raise MCPToolError(f"the MCP server {self.label!r} {self._why_no_answer(connection.task)}")
            return question.answer.result()
        finally:
            question.answer.cancel()  # nobody waits for it any more, and so its work is cancelled, too
            connection.num_waiting -= 1
            if connection.is_retired and not connection.num_waiting:
                connection.end()

    def _retire(self, connection: _Connection) -> None:
        """Ask nothing of a connection any more: the next caller makes a new one. Those that wait for it may get their
        answers yet."""
        if self._connection is connection:
            self._connection = None
        connection.is_retired = True
        self._retired.add(connection)
        connection.task.add_done_callback(lambda _: self._retired.discard(connection))

    def _why_no_answer(self, serving: asyncio.Task[None]) -> str:
        if serving.done():
            error = None if serving.cancelled() else serving.exception()
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            return f"is not there: {error!r}"
        return f"did not answer within {self._timeout_s:g} s"

    async def _serve(self, connection: _Connection) -> None:
        """Holds the connection: it must be opened and closed by one task."""
        from mcp import Client

        async with contextlib.AsyncExitStack() as resources:
            where = await self._where(resources)
            client = await resources.enter_async_context(Client(where, read_timeout_seconds=self._timeout_s))
            async with asyncio.TaskGroup() as group:
                while True:
                    question = await connection.questions.get()
                    if not question.answer.done():
                        task = group.create_task(self._answer(connection, client, question))
                        question.answer.add_done_callback(functools.partial(_cancel, task))

    async def _where(self, resources: contextlib.AsyncExitStack) -> Any:
        """What a client connects to; what must be closed behind it is held."""
        from mcp import StdioServerParameters
        from mcp.client.sse import sse_client
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client

        spec = self._spec
        if spec.url is None:
            relay = ["-I", "-S", mcp_relay.__file__, str(MAX_ANSWER_BYTES), spec.command or "", *spec.args]
            relayed = StdioServerParameters(command=sys.executable, args=relay, env=spec.env or None, cwd=spec.cwd)
            return stdio_client(relayed, errlog=resources.enter_context(log_pipe(_logger, "mcp")))
        from quire_server.mcp_http import bounded_client

        if spec.type == "sse":

            def client_of(headers: dict[str, str] | None = None, timeout: Any = None, auth: Any = None) -> Any:
                return bounded_client(headers, self._timeout_s, MAX_ANSWER_BYTES, reads_events=True)

            return sse_client(
                spec.url,
                headers=spec.headers,
                timeout=self._timeout_s,
                sse_read_timeout=math.inf,
                httpx_client_factory=client_of,
            )
        http = await resources.enter_async_context(bounded_client(spec.headers, self._timeout_s, MAX_ANSWER_BYTES))
        return streamable_http_client(spec.url, http_client=http)

    async def _answer(self, connection: _Connection, client: Any, question: _Question) -> None:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            result = await question.work(client)
        except Exception as error:
            is_answer = isinstance(error, MCPToolError) or (
                isinstance(error, MCPError) and error.code != CONNECTION_CLOSED
            )
            if not is_answer:
                self._retire(connection)
            if not question.answer.done():
                refusal = (
                    error if isinstance(error, MCPToolError) else MCPToolError(f"MCP server {self.label!r}: {error}")
                )
                question.answer.set_exception(refusal)
            if not is_answer:
                raise
        else:
            if not question.answer.done():
                question.answer.set_result(result)

    async def close(self) -> None:
        """End the connection. Idempotent."""
        connections = [*self._retired, *([self._connection] if self._connection is not None else [])]
        self._connection = None
        for connection in connections:
            connection.end()
        if connections:
            await asyncio.wait([connection.task for connection in connections])


def shortened(text: str, max_chars: int) -> str:
    """The beginning of a text, and a line that says how much is left out; of one that was shortened before, too."""
    before = _SHORTENED.search(text)
    length = int(before[1]) if before is not None else len(text)
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[The result has {length} characters; the others are left out.]"


_SHORTENED = re.compile(r"\n\[The result has (\d+) characters; the others are left out\.\]\Z")


def _part_text(part: Any) -> str:
    """One part of a tool's output as text; what is none is named, so that the model knows that there was something."""
    if part.type == "text":
        return str(part.text)
    resource = getattr(part, "resource", part)
    if isinstance(getattr(resource, "text", None), str):
        return str(resource.text)
    kind = getattr(resource, "mime_type", None) or "no stated type"
    where = f" at {resource.uri}" if getattr(resource, "uri", None) else ""
    return f"[{part.type} of {kind}{where}: left out, this model reads text only]"


def _cancel(task: asyncio.Task[None], _: asyncio.Future[Any]) -> None:
    task.cancel()


def _hear(task: asyncio.Task[None]) -> None:
    """Why a connection ended is told to those who wait for it."""
    if not task.cancelled():
        task.exception()
