"""Stands between an agent and the server: passes everything on as it comes, and keeps what was asked and answered."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Exchange", "recording_proxy"]

_NOT_PASSED_ON = ("host", "connection", "transfer-encoding", "content-length", "keep-alive")


@dataclass(slots=True)
class Exchange:
    """One request and its answer."""

    path: str
    body: Any
    """The request's body, parsed; None for none."""
    status: int
    answer: str


@contextlib.contextmanager
def recording_proxy(address: str) -> Iterator[tuple[str, list[Exchange]]]:
    """(address of the proxy, exchanges so far, in the order in which they ended)."""
    exchanges: list[Exchange] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def __getattr__(self, name: str) -> Any:
            if name.startswith("do_"):
                return self._pass_on
            raise AttributeError(name)

        def log_message(self, *arguments: Any) -> None:
            pass

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=120)
            headers = {key: value for key, value in self.headers.items() if key.lower() not in _NOT_PASSED_ON}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            self.send_response(answer.status)
            for key, value in answer.getheaders():
                if key.lower() not in _NOT_PASSED_ON:
                    self.send_header(key, value)
            self.send_header("connection", "close")
            self.end_headers()
            parts = []
            with contextlib.suppress(OSError):  # an agent may leave before the end
                while part := answer.read1(65536):
                    parts.append(part)
                    self.wfile.write(part)
                    self.wfile.flush()
            self.close_connection = True
            connection.close()
            told = b"".join(parts).decode("utf-8", "replace")
            exchanges.append(Exchange(self.path, _parsed(body), answer.status, told))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", exchanges
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _parsed(body: bytes) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(body)
    return body or None
