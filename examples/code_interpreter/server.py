"""An MCP server with one tool, `python`: a program is run in a process of its own, and what it prints is the result.

    quire serve --mcp-servers examples/code_interpreter/mcp_servers.json

A request asks for it with a tool of type `code_interpreter`. Each call is a new interpreter in an empty folder that is
gone afterwards; time, memory, files and output are bounded. By namespaces (`unshare` of util-linux) it has no network,
sees no other process, and is ended with all that it started. Where the system lets no namespaces be made, this server
does not start, unless it is told --without-isolation, and then says so to whoever reads its tool.

Programs read the files that the user of this server may read: run it as a user that may read nothing of value, or in a
container. Needs the package `mcp`, as `quire-server[mcp]` has it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from bounded_program import ISOLATION, Limits, isolates, run_program
from mcp.server import MCPServer

DESCRIPTION = (
    "Runs a Python program and returns what it prints, and the value of its last line. Each call begins anew: nothing "
    "of earlier calls is there."
)
_NO_NETWORK = "There is no network."
_NOT_ISOLATED = "NOT ISOLATED: programs have the network and the processes of the machine that runs them."


def main() -> int:
    parser = argparse.ArgumentParser(description="An MCP server that runs Python programs, over its pipes.")
    parser.add_argument("--timeout-s", type=float, default=Limits().timeout_s, help="of one program")
    parser.add_argument("--memory-bytes", type=int, default=Limits().memory_bytes, help="of one process of a program")
    parser.add_argument("--without-isolation", action="store_true", help="start where there can be no namespaces")
    args = parser.parse_args()
    limits = Limits(timeout_s=args.timeout_s, memory_bytes=args.memory_bytes)
    is_isolated = isolates()
    if not is_isolated:
        print(f"code interpreter: {_NOT_ISOLATED} `{' '.join(ISOLATION)} true` fails here.", file=sys.stderr)
        if not args.without_isolation:
            print("code interpreter: not started; --without-isolation starts it all the same", file=sys.stderr)
            return 1
    server = MCPServer("code interpreter")

    @server.tool(description=f"{DESCRIPTION} {_NO_NETWORK if is_isolated else _NOT_ISOLATED}")
    async def python(code: str) -> str:
        return await asyncio.to_thread(run_program, code, limits, is_isolated=is_isolated)

    server.run("stdio")
    return 0


if __name__ == "__main__":
    sys.exit(main())
