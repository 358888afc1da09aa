"""Stands between the server and an MCP server that speaks over its pipes, in a process of its own.

    python mcp_relay.py MAX_LINE_BYTES COMMAND [ARGUMENT ...]

Passes answers that somebody waits for, and nothing else: a line that is too long is read to its end and left out, and
who waits for it is answered with an error; what the server asks is answered here, what it notifies is left out; what is
no message is counted, and ends the server when there is much of it; of what the server logs a few lines are passed on.
So whatever the server writes is read off the event loop, and costs the caller a bounded amount of memory and of log.
Standard library alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import IO, Any

__all__ = ["Relay", "bounded_lines"]

_CHUNK_BYTES = 1 << 16
_MAX_NOISE_BYTES = 1 << 20
_MAX_LOG_LINES = 50
_MAX_LOG_LINE_BYTES = 500
_END_S = 5.0
"""How long a server may take to end once nothing more is asked of it."""
_TOO_LONG = -32001
_NO_SUCH_METHOD = -32601
_ID = re.compile(rb'"id"\s*:\s*(-?\d+|"[^"\\]{0,200}")')


def bounded_lines(source: IO[bytes], max_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Lines without their ends: what is kept of each, and its whole length. Of a line above `max_bytes` both ends are
    kept, `_CHUNK_BYTES` at most."""
    line, length = bytearray(), 0
    while chunk := source.read1(_CHUNK_BYTES):  # type: ignore[attr-defined]
        *whole, rest = chunk.split(b"\n")
        for part in whole:
            _keep(line, part, length, max_bytes)
            yield bytes(line), length + len(part)
            line, length = bytearray(), 0
        _keep(line, rest, length, max_bytes)
        length += len(rest)
    if length:
        yield bytes(line), length


def _message(line: bytes) -> dict[str, Any] | None:
    """A message of the protocol; None for other output."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_one = isinstance(message, dict) and message.get("jsonrpc") == "2.0" and {"id", "method"} & message.keys()
    return message if is_one else None


def _keep(line: bytearray, part: bytes, length: int, max_bytes: int) -> None:
    line += part
    if length + len(part) > max_bytes:
        del line[_CHUNK_BYTES // 2 : max(_CHUNK_BYTES // 2, len(line) - _CHUNK_BYTES // 2)]


class Relay:
    """One server.

    Args:
        child: The server's process, whose pipes are read and written here.
        max_line_bytes: Longest message that is passed on.
    """

    def __init__(self, child: subprocess.Popen[bytes], max_line_bytes: int) -> None:
        self._child = child
        self._max_line_bytes = max_line_bytes
        self._waiting: set[int | str] = set()
        """Ids of requests that are not answered yet."""
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        """Held while the server is written to."""
        self._noise_bytes = 0
        self._num_logged = 0

    def run(self) -> int:
        """Relay until the server ends; its exit status."""
        pumps = [threading.Thread(target=pump, daemon=True) for pump in (self._pass_requests, self._pass_log)]
        for pump in pumps:
            pump.start()
        assert self._child.stdout is not None
        for line, length in bounded_lines(self._child.stdout, self._max_line_bytes):
            if not self._pass_line(line, length):
                self._child.kill()
                break
        status = self._child.wait()
        status = status if status >= 0 else 128 - status  # as a shell tells of a signal
        pumps[1].join(timeout=1)
        if self._num_logged > _MAX_LOG_LINES:
            self._report(f"{self._num_logged - _MAX_LOG_LINES} more lines of its log are left out")
        return status

    def _pass_line(self, line: bytes, length: int) -> bool:
        """Pass on one line of the server's; whether to go on reading."""
        if length > self._max_line_bytes:
            self._refuse(line, length)
            return True
        message = _message(line)
        if message is None:
            if self._noise_bytes == 0 and line.strip():
                self._report(f"prints what is no message, first: {line[:_MAX_LOG_LINE_BYTES]!r}")
            self._noise_bytes += length + 1 if line.strip() else 1
            if self._noise_bytes > _MAX_NOISE_BYTES:
                self._report(f"printed more than {_MAX_NOISE_BYTES} bytes that are no messages, and is ended")
                return False
            return True
        name = message.get("id")
        if "method" in message:
            if name is not None:
                self._answer(name, message["method"])
            return True
        with self._lock:
            is_awaited = isinstance(name, (int, str)) and name in self._waiting
            self._waiting -= {name} if is_awaited else set()
        if is_awaited:
            self._write(line)
        return True

    def _answer(self, name: Any, method: Any) -> None:
        """Answer what the server asks, which is nothing that is done here."""
        refusal = {"error": {"code": _NO_SUCH_METHOD, "message": "this client does nothing for servers"}}
        answer = {"result": {}} if method == "ping" else refusal
        self._tell_server(json.dumps({"jsonrpc": "2.0", "id": name, **answer}).encode() + b"\n")

    def _tell_server(self, line: bytes) -> bool:
        """Whether it can be told."""
        assert self._child.stdin is not None
        try:
            with self._asking:
                self._child.stdin.write(line)
                self._child.stdin.flush()
        except (OSError, ValueError):  # it has ended, or is asked nothing any more
            return False
        return True

    def _refuse(self, line: bytes, length: int) -> None:
        """Answer whoever waits for a line that is too long: the request that it names, or else all of them."""
        self._report(f"wrote a message of {length} bytes, which is left out")
        with self._lock:
            named = {json.loads(each) for each in _ID.findall(line)} & self._waiting
            answered = named or set(self._waiting)
            self._waiting -= answered
        message = f"the answer has {length} bytes, more than the {self._max_line_bytes} that are read"
        for request_id in answered:
            error = {"code": _TOO_LONG, "message": message}
            self._write(json.dumps({"jsonrpc": "2.0", "id": request_id, "error": error}).encode())

    def _pass_requests(self) -> None:
        assert self._child.stdin is not None
        for line in sys.stdin.buffer:
            message: Any = json.loads(line)
            if isinstance(message, dict) and "method" in message and "id" in message:
                with self._lock:
                    self._waiting.add(message["id"])
            if not self._tell_server(line):
                return
        self._child.stdin.close()
        try:  # who asked is gone, and nobody else ends the server
            self._child.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()

    def _pass_log(self) -> None:
        assert self._child.stderr is not None
        for line, _ in bounded_lines(self._child.stderr, _MAX_LOG_LINE_BYTES):
            self._num_logged += 1
            if self._num_logged <= _MAX_LOG_LINES:
                self._report(line[:_MAX_LOG_LINE_BYTES].decode(errors="replace"))

    def _write(self, line: bytes) -> None:
        with self._lock:
            sys.stdout.buffer.write(line + b"\n")
            sys.stdout.buffer.flush()

    def _report(self, text: str) -> None:
        print(f"MCP server {os.path.basename(str(self._child.args[0]))}: {text}", file=sys.stderr, flush=True)  # type: ignore[index]


def main() -> int:
    command = sys.argv[2:]
    try:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        print(f"MCP server {command[0]}: {error}", file=sys.stderr)
        return 127
    try:
        return Relay(child, int(sys.argv[1])).run()
    finally:
        child.kill()


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # not by way of the interpreter's end, for which a thread still waits at the standard input
