"""A real MCP server with a few tools, over its pipes. Started by the server under test."""

from __future__ import annotations

import os

from mcp.server import MCPServer

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


if __name__ == "__main__":
    server.run("stdio")
