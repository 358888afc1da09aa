"""Clients that speak HTTP/1.0: no chunks, and the connection ends with the body."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 30, "ignore_eos": True}


Answer = tuple[int, dict[str, str], bytes]


def request(method: str, path: str, body: bytes, headers: str = "") -> bytes:
    fields = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}"
    return f"{method} {path} HTTP/1.0\r\n{fields}\r\n".encode() + body


def exchange(url: str, method: str, path: str, body: bytes = b"", *, headers: str = "") -> Answer:
    """(status, headers, everything until the server closes)."""
    at = urlsplit(url)
    with socket.create_connection((at.hostname, at.port), timeout=30) as connection:
        connection.sendall(request(method, path, body, headers))
        received = b""
        while piece := connection.recv(65536):
            received += piece
    top, _, content = received.partition(b"\r\n\r\n")
    status, *lines = top.decode().split("\r\n")
    found = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), found, content


@pytest.mark.parametrize("headers", ["", "Connection: keep-alive\r\n"])
def test_a_stream_comes_as_it_is(live: Any, headers: str) -> None:
    body = json.dumps({**CHAT, "stream": True}).encode()
    status, found, content = exchange(live.url, "POST", "/v1/chat/completions", body, headers=headers)
    assert status == 200
    assert "transfer-encoding" not in found
    assert "content-length" not in found
    assert found["connection"] == "close"
    *events, done, end = content.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_a_whole_answer_has_its_length(live: Any) -> None:
    status, found, content = exchange(live.url, "POST", "/v1/chat/completions", json.dumps(CHAT).encode())
    assert (status, int(found["content-length"]), found["connection"]) == (200, len(content), "close")
    assert json.loads(content)["usage"]["completion_tokens"] == 30
    status, found, content = exchange(live.url, "HEAD", "/v1/models")
    assert (status, content) == (200, b"")
    status, _, content = exchange(live.url, "POST", "/v1/chat/completions", b"{")
    assert status == 400
    assert json.loads(content)["error"]["type"] == "invalid_request_error"


def test_a_client_that_leaves_ends_its_request(live: Any) -> None:
    at = urlsplit(live.url)
    body = json.dumps({**CHAT, "max_tokens": 400, "stream": True}).encode()
    with socket.create_connection((at.hostname, at.port), timeout=30) as connection:
        connection.sendall(request("POST", "/v1/chat/completions", body))
        assert connection.recv(1024)
    live.wait_idle(5)
