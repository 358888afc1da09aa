"""What one connection may send, hold and leave unread: bytes, frames and waits are bounded, with a key or without."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

HEAD_BYTES = 4096
CHAT = "/v1/chat/completions"
GET = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n"
ONE_TOKEN = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}).encode()


@pytest.fixture(scope="module")
def strict(make_live: Any) -> Any:
    """A server with a key and small limits."""
    return make_live(
        api_key=("key",),
        h11_max_incomplete_event_size=HEAD_BYTES,
        h11_max_header_count=32,
        header_timeout_s=0.5,
        body_timeout_s=1.0,
        send_timeout_s=1.0,
        timeout_keep_alive=1,
        max_body_bytes=1 << 16,
    )


@pytest.fixture(scope="module")
def crowded(make_live: Any) -> Any:
    """A server of four connections."""
    return make_live(limit_concurrency=4, header_timeout_s=60.0, timeout_keep_alive=60)


@contextlib.contextmanager
def connection(server: Any, sent: bytes = b"") -> Iterator[socket.socket]:
    at = urlsplit(server.url)
    with socket.create_connection((at.hostname, at.port), timeout=30) as made:
        made.sendall(sent)
        yield made


def read_to_end(made: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := made.recv(65536):
            received += piece
    return received


def read_answer(made: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of the next answer that tells its length."""
    received = b""
    while b"\r\n\r\n" not in received:
        piece = made.recv(65536)
        assert piece, f"no answer, only {received!r}"
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    while len(body) < int(headers.get("content-length", 0)):
        body += made.recv(65536)
    return int(status.split()[1]), headers, body


def refused(server: Any, sent: bytes) -> tuple[int, str]:
    """(status, code) of the only answer to these bytes, after which the connection ends."""
    with connection(server, sent) as made:
        status, headers, body = read_answer(made)
        assert headers["connection"] == "close"
        assert headers["content-type"] == "application/json"
        assert read_to_end(made) == b""
    error = json.loads(body)["error"]
    assert error["message"]
    return status, error["code"]


def post(body: bytes, *lines: bytes, path: str = CHAT) -> bytes:
    head = [
        f"POST {path} HTTP/1.1".encode(),
        b"Host: a",
        b"Content-Type: application/json",
        b"Authorization: Bearer key",
    ]
    return b"\r\n".join([*head, *lines]) + b"\r\n\r\n" + body


# Heads


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (GET + b"X: " + b"a" * 5000, (431, "headers_too_large")),  # refused before it is whole
        (GET + b"X: " + b"a" * 5000 + b"\r\n\r\n", (431, "headers_too_large")),
        (GET + b"".join(b"X%d: %b\r\n" % (n, b"a" * 500) for n in range(10)), (431, "headers_too_large")),
        (GET + b"X" * 5000, (431, "headers_too_large")),
        (GET + b"a: b\r\n" * 33, (431, "headers_too_large")),
        (b"GET /" + b"a" * 5000, (414, "headers_too_large")),
        (b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", (414, "headers_too_large")),
        (b"\r\n" * 40_000, (431, "headers_too_large")),
        (b"\x16\x03\x01\x02\x00\x01\x00", (400, "invalid_http")),  # a client that speaks TLS
    ],
)
def test_large_heads_are_refused_without_a_key(strict: Any, sent: bytes, expected: tuple[int, str]) -> None:
    assert refused(strict, sent) == expected


def test_a_head_up_to_the_limit_is_served(strict: Any) -> None:
    known = len("/v1/models" + "Hosta" + "AuthorizationBearer key" + "X") + 3 * 4
    fields = GET + b"Authorization: Bearer key\r\nX: "
    with connection(strict, fields + b"a" * (HEAD_BYTES - known) + b"\r\n\r\n") as made:
        assert read_answer(made)[0] == 200
    assert refused(strict, fields + b"a" * (HEAD_BYTES - known + 1) + b"\r\n\r\n") == (431, "headers_too_large")


def test_a_refusal_reaches_a_client_that_sends_on(strict: Any) -> None:
    with connection(strict, GET + b"X: ") as made:
        made.sendall(b"a" * (64 << 20))
        assert read_answer(made)[0] == 431


@pytest.mark.parametrize(
    "sent",
    [
        post(b"3\r\nabc\r\n0\r\n\r\n", b"Transfer-Encoding: gzip, chunked"),
        post(b"3\r\nabc\r\n0\r\n\r\n", b"Transfer-Encoding: identity", b"Transfer-Encoding: chunked"),
        post(b"3\r\nabc\r\n0\r\n\r\n", b"Transfer-Encoding: chunked", b"Content-Length: 13"),
        post(b"3\r\nabc\r\n0\r\n\r\n", b"Content-Length: 13", b"Transfer-Encoding: chunked"),
        post(b"3\r\nabc\r\n0\r\n\r\n", b"Transfer-Encoding: chunked").replace(b"HTTP/1.1", b"HTTP/1.0"),
        post(b"abc", b"Content-Length: 3", b"Content-Length: 3"),
        post(b"abc", b"Content-Length: 3, 3"),
        post(b"abc", b"Content-Length: -3"),
        post(b"abc", b"Content-Length: 99999999999999999999999"),
        post(b"fffffffffffffffff\r\nabc", b"Transfer-Encoding: chunked"),
        GET + b"X: a\r\n b\r\n\r\n",
        GET + b"Transfer-Encoding:\r\n chunked\r\n\r\n",
        GET.replace(b"\r\n", b"\n") + b"\n",
        GET + b"X : a\r\n\r\n",
        GET + b"X: a\x00b\r\n\r\n",
        GET + b"Host: b\r\n\r\n",
        b"GET / HTTP/0.9\r\n\r\n",
        b"GET / HTTP/2.0\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT other:80 HTTP/1.1\r\nHost: other:80\r\n\r\n",
    ],
)
def test_requests_that_another_program_may_read_otherwise_are_refused(strict: Any, sent: bytes) -> None:
    assert refused(strict, sent) == (400, "invalid_http")


def test_requests_of_http_0_9_get_no_answer_for_ever(strict: Any) -> None:
    assert refused(strict, b"GET /\r\n") == (408, "timeout")


def test_an_offer_of_http_2_is_passed_over(live: Any) -> None:
    """Java's client makes it with its first request, also one with a body."""
    offer = [b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAEAAEAAAAIAAAAB"]
    with connection(live, post(ONE_TOKEN, *offer, b"Content-Length: %d" % len(ONE_TOKEN))) as made:
        for _ in range(2):
            status, _, body = read_answer(made)
            assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 1)
            made.sendall(post(ONE_TOKEN, b"Content-Length: %d" % len(ONE_TOKEN)))
        read_answer(made)


# Bodies


def test_chunks_may_not_be_mostly_framing(strict: Any) -> None:
    start = post(b"", b"Transfer-Encoding: chunked")
    for framing in (
        b"1;" + b"a" * (1 << 20) + b"\r\n{\r\n",
        b"1\r\n \r\n" * 10_000,
        b"0\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
        b"0\r\nX: " + b"a" * (1 << 20),
    ):
        assert refused(strict, start + framing) == (400, "invalid_http")


def test_trailers_are_no_headers(strict: Any) -> None:
    sent = post(
        b"%x\r\n" % len(ONE_TOKEN) + ONE_TOKEN + b"\r\n0\r\nX-Request-Id: theirs\r\n\r\n", b"Transfer-Encoding: chunked"
    )
    with connection(strict, sent) as made:
        status, headers, _ = read_answer(made)
    assert (status, headers["x-request-id"] == "theirs") == (200, False)


def test_small_chunks_of_a_real_body_pass(live: Any) -> None:
    body = json.dumps({"prompt": "x" * 100, "max_tokens": 1}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    with connection(live, post(chunks + b"0\r\n\r\n", b"Transfer-Encoding: chunked", path="/v1/completions")) as made:
        assert read_answer(made)[0] == 200


def test_a_body_without_a_key_is_not_waited_for(strict: Any) -> None:
    start = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 60000\r\n\r\n"
    with connection(strict, start) as made:
        assert read_answer(made)[0] == 401


def test_a_body_that_nobody_reads_does_not_hold_the_connection(strict: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_server.http_protocol.LINGER_S", 0.5)
    key = b"Authorization: Bearer key\r\n"
    with connection(strict, GET + key + b"Content-Length: 60000\r\n\r\n") as made:
        assert read_answer(made)[0] == 200
        assert read_to_end(made) == b""
    # And where it comes after all, the next request follows.
    with connection(strict, GET + key + b"Content-Length: 60000\r\n\r\n") as made:
        assert read_answer(made)[0] == 200
        made.sendall(b"a" * 60000 + GET + key + b"\r\n")
        assert read_answer(made)[0] == 200


def test_an_answer_before_the_end_of_the_body_reaches_a_client_that_closes(strict: Any) -> None:
    at = urlsplit(strict.url)
    for body, expected in ((b"a" * (16 << 20), 413), (b"a" * 60_000, 401)):
        made = http.client.HTTPConnection(str(at.hostname), at.port, timeout=30)
        key = "key" if expected == 413 else "wrong"
        headers = {"Connection": "close", "Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        made.request("POST", "/v1/completions", body, headers)
        assert made.getresponse().status == expected
        made.close()


def test_a_slow_body_is_refused(strict: Any) -> None:
    assert refused(strict, post(b"{", b"Content-Length: 100")) == (408, "timeout")


# Waits


@pytest.mark.parametrize("sent", [b"", GET + b"Authorization: Bearer key\r\n\r\n"])
def test_a_connection_without_a_request_ends(strict: Any, sent: bytes) -> None:
    with connection(strict, sent) as made:
        assert read_to_end(made).count(b"HTTP/1.1 ") == bool(sent)


def test_a_head_that_comes_byte_by_byte_is_refused(strict: Any) -> None:
    with connection(strict, b"GET / HTTP/1.1\r\n") as made:

        def trickle() -> None:
            with contextlib.suppress(OSError):
                for _ in range(1000):
                    made.sendall(b"X")
                    time.sleep(0.01)

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            assert read_answer(made)[0] == 408
        finally:
            made.close()
            thread.join()


def test_thousands_of_requests_at_once_are_answered_up_to_a_bound(strict: Any) -> None:
    request = GET + b"Authorization: Bearer key\r\n\r\n"
    with connection(strict, request * 3) as made:
        assert [read_answers(made, 3).count(b"HTTP/1.1 200 OK")] == [3]
    with connection(strict) as made:
        sender = threading.Thread(target=send_quietly, args=(made, request * 5000))
        sender.start()
        received = read_to_end(made)
        sender.join()
    assert 1 <= received.count(b"HTTP/1.1 200 OK") <= 40


def read_answers(made: socket.socket, count: int) -> bytes:
    received = b""
    while received.count(b'"has_more":false') < count:
        piece = made.recv(65536)
        assert piece, received
        received += piece
    return received


def send_quietly(made: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        made.sendall(data)


def test_a_client_that_leaves_ends_also_the_request_before_its_last(live: Any) -> None:
    long = json.dumps({"prompt": "x", "max_tokens": 500, "ignore_eos": True}).encode()
    requests = post(long, b"Content-Length: %d" % len(long), path="/v1/completions") * 3
    with connection(live, requests):
        wait_for(lambda: live.llm.engine.num_requests() == 1)
    live.wait_idle(5)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_client_that_does_not_read_its_stream_is_dropped(strict: Any) -> None:
    body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True, "n": 32, "logprobs": 20}
    content = json.dumps(body).encode()
    at = urlsplit(strict.url)
    with socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.connect((at.hostname, at.port))
        made.sendall(post(content, b"Content-Length: %d" % len(content), path="/v1/completions"))
        strict.wait_idle(30)
        received = read_to_end(made)
    assert b"[DONE]" not in received


# Connections


def test_connections_that_wait_give_way_and_health_checks_are_answered(crowded: Any) -> None:
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connection(crowded, b"GET / HT")) for _ in range(40)]
        with connection(crowded, GET + b"\r\n") as made:
            assert read_answer(made)[0] == 200
        assert read_to_end(idle[0]) == b""  # it was dropped for others
    long = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True}
    content = json.dumps(long).encode()
    with contextlib.ExitStack() as stack:
        crowded.call(crowded.llm.client.pause("keep"))
        try:
            for _ in range(4):
                sent = post(content, b"Content-Length: %d" % len(content), path="/v1/completions")
                stack.enter_context(connection(crowded, sent))
            wait_for(lambda: crowded.llm.engine.num_requests() == 4)
            assert refused(crowded, GET + b"\r\n") == (503, "too_many_connections")
            with connection(crowded, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n") as made:
                status, headers, _ = read_answer(made)
                assert (status, headers["connection"]) == (200, "close")
            with contextlib.ExitStack() as others:
                for _ in range(40):
                    others.enter_context(connection(crowded, b"GET /hea"))
                with connection(crowded, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n") as made:
                    assert read_answer(made)[0] == 200
        finally:
            stack.close()
            crowded.call(crowded.llm.client.resume())
    crowded.wait_idle()
    assert crowded.client.get("/v1/models").status_code == 200


# Websockets

KEY = {"additional_headers": {"Authorization": "Bearer key"}}


def closing_code(socket_: Any) -> int | None:
    """Why the server closed."""
    with pytest.raises(ConnectionClosed) as closed:
        socket_.recv(timeout=30)
    return None if closed.value.rcvd is None else closed.value.rcvd.code


def test_a_websocket_message_is_bounded_by_what_it_inflates_to(strict: Any) -> None:
    with connect(strict.url.replace("http", "ws") + "/v1/responses", **KEY) as socket_:
        socket_.send("a" * (8 << 20))  # 8 KB on the wire
        assert closing_code(socket_) == 1009


def test_frames_of_a_websocket_message_are_bounded(strict: Any) -> None:
    with connect(strict.url.replace("http", "ws") + "/v1/responses", compression=None, **KEY) as socket_:
        with contextlib.suppress(ConnectionClosed):
            socket_.send(("" for _ in range(20_000)), text=True)
        assert closing_code(socket_) == 1009


def test_who_sends_pings_must_read_the_pongs(live: Any, strict: Any) -> None:
    lines = [b"Upgrade: websocket", b"Connection: Upgrade", b"Sec-WebSocket-Version: 13"]
    lines.append(b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
    head = b"GET /v1/responses HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer key\r\n" + b"\r\n".join(lines) + b"\r\n\r\n"
    ping = b"\x89" + struct.pack("!B", 0x80 | 125) + b"\0\0\0\0" + b"p" * 125
    with connection(strict, head) as made:
        assert made.recv(65536).startswith(b"HTTP/1.1 101")  # frames may follow only then
        with pytest.raises(ConnectionError):
            made.sendall(ping * 1_000_000)  # 130 MB: more than the system buffers
    with connection(live, head) as made:  # where nobody is dropped so soon
        assert made.recv(65536).startswith(b"HTTP/1.1 101")
        made.settimeout(1)
        with pytest.raises(TimeoutError):
            made.sendall(ping * 1_000_000)
        waiting = [each.transport.get_write_buffer_size() for each in live._http.server_state.connections]
        assert max(waiting) < 1 << 20


@pytest.mark.parametrize("lines", [[], [b"Sec-WebSocket-Version: 12"], [b"X: " + b"a" * 60_000]])
def test_a_wrong_handshake_is_answered(live: Any, lines: list[bytes]) -> None:
    head = [b"GET /v1/responses HTTP/1.1", b"Host: a", b"Upgrade: websocket", b"Connection: Upgrade", *lines]
    with connection(live, b"\r\n".join(head) + b"\r\n\r\n") as made:
        assert 400 <= read_answer(made)[0] < 500
