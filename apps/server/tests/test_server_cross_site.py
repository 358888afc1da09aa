"""Web sites that use a visitor's browser: what the browser says about them is believed, and decides."""

from __future__ import annotations

import socket
from typing import Any
from urllib.parse import urlsplit

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

BODY = {"prompt": "x", "max_tokens": 1}
EVIL = "https://evil.example"


@pytest.fixture(scope="module")
def friendly(make_live: Any) -> Any:
    """A server that knows an origin and a host name."""
    return make_live(allowed_origins=("https://chat.example",), allowed_hosts=("models.example", "*.lab.example"))


@pytest.fixture(scope="module")
def keyed(make_live: Any) -> Any:
    return make_live(api_key=("key",))


def status(server: Any, headers: dict[str, str], path: str = "/v1/completions") -> tuple[int, str | None]:
    """(status, code) of a completion, or of a GET for other paths."""
    if path == "/v1/completions":
        response = server.post(path, BODY, headers=headers)
    else:
        response = server.client.get(path, headers=headers)
    is_error = response.status_code >= 400
    return response.status_code, response.json()["error"]["code"] if is_error else None


REFUSED = (403, "origin_not_allowed")


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": EVIL},
        {"origin": EVIL, "sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
        {"origin": "null"},
        {"origin": "http://localhost:1"},
        {"origin": "http://127.0.0.1"},
        {"origin": "evil.example"},
        {"origin": ""},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},  # a form
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
        {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"},
    ],
)
def test_other_web_sites_are_refused_on_every_route(live: Any, headers: dict[str, str]) -> None:
    assert status(live, headers) == REFUSED
    for path in ("/v1/models", "/metrics", "/version", "/nowhere", "/openapi.json"):
        if headers.get("sec-fetch-mode") != "navigate":
            assert status(live, headers, path) == REFUSED
    assert live.client.get("/health", headers=headers).status_code == 200


def test_a_page_of_this_server_and_programs_are_served(live: Any) -> None:
    host = urlsplit(live.url).netloc
    for headers in (
        {},
        {"origin": live.url},
        {"origin": live.url.upper()},
        {"origin": live.url, "sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"},
        {"origin": f"http://localhost:{urlsplit(live.url).port}", "host": host.replace("127.0.0.1", "localhost")},
        {"sec-fetch-site": "none"},
    ):
        assert status(live, headers) == (200, None)
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert live.client.get("/", headers=link).status_code == 200
    assert live.client.get("/", headers={**link, "sec-fetch-dest": "iframe"}).status_code == 403


def test_origins_that_the_operator_names_are_served(friendly: Any, make_live: Any) -> None:
    assert status(friendly, {"origin": "https://chat.example"}) == (200, None)
    assert status(friendly, {"origin": "https://Chat.example", "sec-fetch-site": "cross-site"}) == (200, None)
    for other in (EVIL, "http://chat.example", "https://chat.example.evil.example", "https://chat.example:8443"):
        assert status(friendly, {"origin": other}) == REFUSED
    everybody = make_live(allowed_origins=("*",))
    for headers in ({"origin": EVIL}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
        assert status(everybody, headers) == (200, None)


@pytest.mark.parametrize("origin", [EVIL, "null", "http://localhost:1"])
def test_websockets_of_other_web_sites_are_refused(live: Any, origin: str) -> None:
    address = live.url.replace("http", "ws") + "/v1/responses"
    with pytest.raises(InvalidStatus) as refusal, connect(address, origin=origin):
        pass
    assert refusal.value.response.status_code == 403
    with connect(address, origin=live.url):
        pass


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example"]
)
def test_names_that_were_made_to_point_here_are_refused(live: Any, host: str) -> None:
    for path in ("/v1/completions", "/v1/models", "/"):
        assert status(live, {"host": host}, path) == (403, "host_not_allowed")
        assert status(live, {"host": host, "origin": f"http://{host}"}, path) == (403, "host_not_allowed")
    assert live.client.get("/health", headers={"host": host}).status_code == 200


def test_own_names_and_addresses_are_served(live: Any, friendly: Any) -> None:
    own = [
        "localhost",
        "localhost:9",
        "LOCALHOST.",
        "a.localhost",
        "127.0.0.1:9",
        "[::1]:9",
        "192.168.1.5",
        "host.docker.internal",
        "gpu-box:8000",
    ]
    for host in (*own, socket.gethostname(), ""):
        assert status(live, {"host": host}) == (200, None), host
    for host in (*own, "models.example", "Models.example:80", "a.lab.example", "a.b.lab.example"):
        assert status(friendly, {"host": host}) == (200, None), host
    for host in ("lab.example", "evil.example", "amodels.example", "xlab.example"):
        assert status(friendly, {"host": host}) == (403, "host_not_allowed")


def test_a_key_is_enough(keyed: Any) -> None:
    """A web site does not know it; a proxy may call the server anything."""
    headers = {"authorization": "Bearer key", "origin": EVIL, "host": "evil.example"}
    assert status(keyed, headers) == (200, None)
    del headers["authorization"]
    assert status(keyed, headers) == (401, "invalid_api_key")


def test_hosts_that_are_named_hold_with_a_key_too(make_live: Any) -> None:
    server = make_live(api_key=("key",), allowed_hosts=("models.example",))
    for host, expected in (("models.example", (200, None)), ("evil.example", (403, "host_not_allowed"))):
        assert status(server, {"authorization": "Bearer key", "host": host}) == expected


def test_browsers_must_say_that_a_body_is_json(live: Any) -> None:
    for headers, expected in (({"origin": live.url}, 415), ({"sec-fetch-site": "same-origin"}, 415), ({}, 200)):
        response = live.client.post("/v1/completions", content=b'{"prompt": "x", "max_tokens": 1}', headers=headers)
        assert response.status_code == expected


def test_the_chat_page_keeps_to_itself(keyed: Any) -> None:
    headers = keyed.client.get("/?key=key").headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["script-src"] == policy["style-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert headers["x-content-type-options"] == "nosniff"
    assert (headers["x-frame-options"], headers["referrer-policy"]) == ("DENY", "no-referrer")
    assert headers["cache-control"] == "no-store"
