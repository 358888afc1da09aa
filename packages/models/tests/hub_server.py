"""A hub of one repository on loopback."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """The hub's answers about one repository, owner/name, whose files lie in `root`."""

    root: Path

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path, model = self.path.partition("?")[0], "/api/models/owner/name"
        names = [file.relative_to(self.root).as_posix() for file in self.root.rglob("*") if file.is_file()]
        status, data = 200, b""
        if path.startswith(f"{model}/tree/"):
            data = json.dumps([{"type": "file", "oid": COMMIT, "size": 1, "path": name} for name in names]).encode()
        elif path.startswith(f"{model}/"):
            siblings = [{"rfilename": name} for name in names]
            data = json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": siblings}).encode()
        elif path.startswith("/owner/name/resolve/"):
            data = (self.root / path.split("/", 5)[5]).read_bytes()
        else:
            status = 404
        self.send_response(status)
        for name, value in (("Content-Length", len(data)), ("X-Repo-Commit", COMMIT)):
            self.send_header(name, str(value))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def hub_of(root: Path) -> Iterator[str]:
    """The address of a hub whose repository owner/name has the files in `root`."""
    handler = type("Handler", (Hub,), {"root": root})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
