"""An MCP server over pipes that does one thing wrong, which its first argument names. A second one is a file that gets
a letter for each call of its tool, and another for each call that is cancelled. Started by the tests."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

WRONG = sys.argv[1]
OUT = sys.stdout.buffer
TOOL = {"name": "go", "description": "Goes.", "inputSchema": {"type": "object", "properties": {}}}


def answer(request: dict[str, Any], result: dict[str, Any]) -> None:
    OUT.write(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}).encode() + b"\n")
    OUT.flush()


def text(request: dict[str, Any], value: str) -> None:
    answer(request, {"content": [{"type": "text", "text": value}]})


def note(letter: str) -> None:
    with open(sys.argv[2], "a") as file:
        file.write(letter)


def main() -> None:
    num_pages = 0
    while WRONG == "chatter":
        OUT.write(b"starting up ...\n" * 1000)
    while WRONG == "almost":
        OUT.write(b'{"level": "info", "id": 1}\n' * 1000)
    for line in sys.stdin:
        request = json.loads(line)
        method = request.get("method")
        if "id" not in request:
            if method == "notifications/cancelled" and len(sys.argv) > 2:
                note("c")
            continue
        if WRONG == "log":
            print("debug: " + "x" * 10_000 + "\n" * 200, file=sys.stderr, flush=True)
        if method == "initialize":
            version = request["params"]["protocolVersion"]
            info = {"name": "bad", "version": "1"}
            answer(request, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info})
        elif method == "tools/list":
            num_pages += 1
            page: dict[str, Any] = {"tools": [TOOL]}
            if WRONG == "endless":
                page = {"tools": [{**TOOL, "name": f"t{num_pages}"}], "nextCursor": "more"}
            elif WRONG == "many":
                page = {"tools": [{**TOOL, "name": f"t{number}"} for number in range(1001)]}
            elif WRONG == "wordy":
                page = {
                    "tools": [{**TOOL, "name": f"t{num_pages}", "description": "d" * 3_000_000}],
                    "nextCursor": "more",
                }
            elif WRONG == "odd":
                long = {"type": "object", "properties": {"a": {"enum": ["v" * 70_000]}}}
                page = {
                    "tools": [
                        {**TOOL, "description": "d" * 20_000},
                        TOOL,
                        {**TOOL, "name": "a name\nof two lines"},
                        {**TOOL, "name": "long", "inputSchema": long},
                    ]
                }
            answer(request, page)
        elif method == "tools/call":
            if len(sys.argv) > 2:
                note("x")
            arguments = request["params"].get("arguments") or {}
            if arguments.get("hang"):
                time.sleep(600)
            if arguments.get("wait"):
                continue  # it goes on reading, and answers never
            time.sleep(arguments.get("seconds", 0))
            num_chars = arguments.get("num_chars", 4)
            if WRONG == "noise":
                OUT.write(b"a line that is no message\n\n")
            if WRONG == "talk":  # of which nothing is an answer
                OUT.write(b'{"jsonrpc": "2.0", "method": "notifications/progress", "params": {}}\n' * 100_000)
                for method in ("ping", "sampling/createMessage"):
                    OUT.write(json.dumps({"jsonrpc": "2.0", "id": 7, "method": method}).encode() + b"\n")
                    OUT.flush()
                    print(f"got {sys.stdin.readline().strip()}", file=sys.stderr, flush=True)
                OUT.write(b'{"jsonrpc": "2.0", "id": 12345, "result": {}}\n')
            text(request, "done" if num_chars == 4 else "a" * num_chars)
        else:
            answer(request, {})


if __name__ == "__main__":
    main()
