"""A real MCP server with a few tools, over its pipes, or over HTTP for who brings the key. Started by the tests."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import uvicorn
from mcp.server import MCPServer
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


def serve_http() -> None:
    """Serve on a free port, whose address is printed first."""
    inner = server.streamable_http_app()

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (b"authorization", b"Bearer secret") not in scope["headers"]:
            await Response(status_code=401)(scope, receive, send)
        else:
            await inner(scope, receive, send)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(f"http://127.0.0.1:{listening.getsockname()[1]}/mcp", flush=True)
        uvicorn.Server(uvicorn.Config(guarded, log_level="error")).run([listening])


if __name__ == "__main__":
    if sys.argv[1:] == ["http"]:
        serve_http()
    else:
        server.run("stdio")
