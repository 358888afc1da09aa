"""A real MCP server with a few tools, over its pipes, or over HTTP for who brings the key. Started by the tests."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from typing import Any

import uvicorn
from mcp.server import MCPServer
from mcp.types import EmbeddedResource, ImageContent, TextContent, TextResourceContents
from starlette.responses import Response

server = MCPServer("tools")


@server.tool()
def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"Sunny in {city}"


@server.tool()
def divide(a: float, b: float) -> str:
    """a / b."""
    return str(a / b)


@server.tool()
def leave() -> str:
    """Ends the process."""
    os._exit(3)


@server.tool()
async def hang() -> str:
    """Never answers."""
    await asyncio.Event().wait()
    return ""


@server.tool()
def picture() -> list[Any]:
    """Shows a place."""
    note = TextResourceContents(uri="file:///note.txt", text="by the sea")
    return [
        TextContent(type="text", text="Here:"),
        ImageContent(type="image", data="AAAA", mime_type="image/png"),
        EmbeddedResource(type="resource", resource=note),
    ]


def add_many() -> None:
    """200 more tools."""
    for number in range(200):
        server.add_tool(lambda number=number: str(number), name=f"tool_{number}", description="One of many.")


def serve_http(kind: str) -> None:
    """Serve on a free port, whose address is printed first."""
    inner = server.sse_app() if kind == "sse" else server.streamable_http_app()
    path = "sse" if kind == "sse" else "mcp"

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (b"authorization", b"Bearer secret") not in scope["headers"]:
            await Response(status_code=401)(scope, receive, send)
        else:
            await inner(scope, receive, send)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(f"http://127.0.0.1:{listening.getsockname()[1]}/{path}", flush=True)
        uvicorn.Server(uvicorn.Config(guarded, log_level="error")).run([listening])


if __name__ == "__main__":
    if sys.argv[1:] in (["http"], ["sse"]):
        serve_http(sys.argv[1])
    else:
        if sys.argv[1:] == ["many"]:
            add_many()
        server.run("stdio")
