"""What is fetched for a stranger, and what is not: addresses, redirects, sizes, times."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from quire_interfaces import Modality
from quire_multimodal import MediaConfig, MediaError, MediaSource, fetch_media, is_public
from quire_multimodal.sources import load

LOCAL = MediaConfig(
    allow_private_media_addresses=True, media_max_bytes=1000, media_max_redirects=3, media_fetch_timeout_s=5
)


class Handler(http.server.BaseHTTPRequestHandler):
    """A host with every kind of misbehaviour; the path says which."""

    def do_GET(self) -> None:
        name, _, rest = self.path.strip("/").partition("/")
        self.server.requests.append((self.headers["Host"], self.path))  # type: ignore[attr-defined]
        getattr(self, f"answer_{name}")(rest)

    def _headers(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def answer_good(self, rest: str) -> None:
        self._headers(200, Content_Length="5")
        self.wfile.write(b"hello")

    def answer_unsized(self, rest: str) -> None:
        self._headers(200)
        self.wfile.write(b"hello")

    def answer_loop(self, rest: str) -> None:
        self._headers(302, Location=f"/loop/{int(rest or 0) + 1}")

    def answer_to(self, rest: str) -> None:
        self._headers(307, Location=rest)

    def answer_nowhere(self, rest: str) -> None:
        self._headers(301)

    def answer_large(self, rest: str) -> None:
        self._headers(200, Content_Length="100000000")
        self.wfile.write(b"x" * 100)

    def answer_endless(self, rest: str) -> None:
        self._headers(200)
        while True:
            self.wfile.write(b"x" * 10_000)

    def answer_cut(self, rest: str) -> None:
        self._headers(200, Content_Length="900")
        self.wfile.write(b"x" * 100)

    def answer_slow(self, rest: str) -> None:
        self._headers(200)
        while not self.server.stopped.wait(0.05):  # type: ignore[attr-defined]
            self.wfile.write(b"x")

    def answer_silent(self, rest: str) -> None:
        while not self.server.stopped.wait(0.05):  # type: ignore[attr-defined]
            self.wfile.write(b"X")  # of a status line that never ends

    def answer_missing(self, rest: str) -> None:
        self._headers(404)

    def answer_nonsense(self, rest: str) -> None:
        self.wfile.write(b"\0\1\2 nothing of HTTP\r\n\r\n")

    def log_message(self, *args: Any) -> None:
        pass

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            return  # the other side has had enough


@pytest.fixture
def host() -> Iterator[Any]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests, server.stopped = [], threading.Event()  # type: ignore[attr-defined]
    server.url = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.stopped.set()  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("127.0.0.1", False),
        ("127.8.8.8", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.100.100.200", False),
        ("168.63.129.16", False),
        ("192.0.0.192", False),
        ("192.88.99.1", False),
        ("192.0.2.1", False),
        ("198.18.0.1", False),
        ("224.0.0.1", False),
        ("239.255.255.250", False),
        ("255.255.255.255", False),
        ("240.0.0.1", False),
        ("::", False),
        ("::1", False),
        ("::127.0.0.1", False),
        ("fe80::1", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("fd00:ec2::254", False),
        ("fec0::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:169.254.169.254", False),
        ("::ffff:93.184.216.34", True),
        ("2002:7f00:1::", False),
        ("2002:a9fe:a9fe::1", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::a9fe:a9fe", False),
        ("64:ff9b::5db8:d822", True),
        ("64:ff9b:1::5db8:d822", False),
        ("2001:0:7f00:1::1", False),
        ("2001:db8::1", False),
    ],
)
def test_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public


@pytest.mark.parametrize("path", ["/good", "/unsized", "/to//good", "/good/ä b?c=d e#f"])
def test_what_is_there_is_fetched(host: Any, path: str) -> None:
    assert fetch_media(host.url + path.replace("d e", "d"), LOCAL) == b"hello"


@pytest.mark.parametrize(
    ("path", "code", "message"),
    [
        ("/loop", "media_fetch_failed", "more than 3 redirects"),
        ("/nowhere", "media_fetch_failed", "to nowhere"),
        ("/missing", "media_fetch_failed", "404"),
        ("/cut", "media_fetch_failed", "cut short"),
        ("/nonsense", "media_fetch_failed", "cannot be fetched"),
        ("/large", "media_too_large", "1,000 bytes"),
        ("/endless", "media_too_large", "1,000 bytes"),
        ("/to/file:///etc/passwd", "media_not_allowed", "only http and https"),
        ("/to/gopher://127.0.0.1/", "media_not_allowed", "only http and https"),
        ("/to/http://[::1:80/", "media_fetch_failed", "cannot be fetched"),
        ("/to/http://127.0.0.1:99999/", "media_fetch_failed", "cannot be fetched"),
    ],
)
def test_what_goes_wrong_is_said(host: Any, path: str, code: str, message: str) -> None:
    with pytest.raises(MediaError, match=message) as failure:
        fetch_media(host.url + path, LOCAL)
    assert failure.value.code == code


@pytest.mark.parametrize("path", ["/slow", "/silent"])
def test_who_dribbles_is_left(host: Any, path: str) -> None:
    start = time.monotonic()
    with pytest.raises(MediaError, match=r"not there within 0\.3 s"):
        fetch_media(host.url + path, MediaConfig(allow_private_media_addresses=True, media_fetch_timeout_s=0.3))
    assert time.monotonic() - start >= 0.29


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1/", "http://localhost/", "http://0x7f.1/", "http://2130706433/", "http://[::1]/",
            "http://[::ffff:127.0.0.1]/", "http://0/"],
)  # fmt: skip
def test_private_addresses_are_not_asked(url: str) -> None:
    with pytest.raises(MediaError, match="not public") as failure:
        fetch_media(url, MediaConfig())
    assert failure.value.code == "media_not_allowed"


def test_a_redirect_is_checked_like_the_first_address(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = MediaConfig(allow_private_media_addresses=True, allowed_media_domains=("127.0.0.1",))
    assert fetch_media(f"{host.url}/good", config) == b"hello"
    with pytest.raises(MediaError, match="not fetched from localhost"):
        fetch_media(f"{host.url}/to/http://localhost:{host.server_port}/good", config)
    assert [path for _, path in host.requests] == ["/good", f"/to/http://localhost:{host.server_port}/good"]


def test_a_name_is_asked_for_once_and_its_address_is_kept(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that answers with another address the second time (DNS rebinding) is not asked twice."""
    asked = []

    def resolve(name: str, port: int, **others: Any) -> list[Any]:
        asked.append(name)
        assert len(asked) == 1
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    connect = socket.create_connection
    targets = []
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "create_connection", lambda to, **more: targets.append(to) or _raw(connect, to))
    assert fetch_media(f"http://media.test:{host.server_port}/good", LOCAL) == b"hello"
    assert asked == ["media.test"]
    assert targets == [("127.0.0.1", host.server_port)]
    assert host.requests == [(f"media.test:{host.server_port}", "/good")]


def _raw(connect: Any, to: tuple[str, int]) -> socket.socket:
    connection = socket.socket()
    connection.settimeout(5)
    connection.connect(to)
    return connection


def test_one_private_address_among_others_is_enough_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in ("93.184.216.34", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    with pytest.raises(MediaError, match="not public"):
        fetch_media("http://media.test/", MediaConfig())


def test_a_name_server_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer.wait() and [])
    with pytest.raises(MediaError, match=r"not there within 0\.1 s"):
        fetch_media("http://media.test/", MediaConfig(media_fetch_timeout_s=0.1))
    answer.set()


def test_an_address_that_nobody_listens_at() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(MediaError, match="ConnectionRefusedError"):
        fetch_media(f"http://127.0.0.1:{port}/", LOCAL)


def test_a_host_that_speaks_no_tls(host: Any) -> None:
    with pytest.raises(MediaError, match="cannot be fetched"):  # by TLS, or by the connection that the host resets
        fetch_media(host.url.replace("http", "https") + "/good", LOCAL)
    assert host.requests == []


def test_settings_reach_the_fetch(host: Any) -> None:
    source = MediaSource(modality=Modality.IMAGE, url=f"{host.url}/good")
    assert load(source, MediaConfig(allow_private_media_addresses=True)).data == b"hello"
    with pytest.raises(MediaError, match="4 bytes"):
        load(source, MediaConfig(allow_private_media_addresses=True, media_max_bytes=4))
    with pytest.raises(MediaError, match="not public"):
        load(source, MediaConfig())
    with pytest.raises(MediaError, match="--allowed-media-domains"):
        load(source, MediaConfig(allowed_media_domains=("example.com",)))
    looping = MediaSource(modality=Modality.IMAGE, url=f"{host.url}/loop")
    with pytest.raises(MediaError, match="more than 0 redirects"):
        load(looping, MediaConfig(allow_private_media_addresses=True, media_max_redirects=0))
