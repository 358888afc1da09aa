"""API keys: every route but /health wants one, whatever else is wrong with the request."""

from __future__ import annotations

import re

import pytest

PUBLIC_PATHS = {"/health", "/ping", "/ready", "/page/{name}"}
KEYS = ("first-key", "zweiter-schlüssel")


@pytest.fixture(scope="module")
def keyed(make_live):
    return make_live(api_key=KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(keyed, key):
    headers = {"authorization": b"Bearer " + key.encode()}
    assert keyed.client.get("/v1/models", headers=headers).status_code == 200
    body = {"prompt": "x", "max_tokens": 1}
    assert keyed.post("/v1/completions", body, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer first-ke", "Bearer first-keyy", "Basic first-key", "first-key"]
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/version"),
        ("GET", "/"),
        ("GET", "/openapi.json"),
        ("GET", "/nowhere"),
        ("GET", "/health/../metrics"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
    ],
)
def test_everything_else_is_closed(keyed, method, path, authorization):
    headers = {} if authorization is None else {"authorization": authorization}
    response = keyed.client.request(method, path, headers=headers, content=b"{" if method == "POST" else None)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"


def test_every_route_that_there_is_is_closed(keyed):
    headers = {"authorization": b"Bearer " + KEYS[0].encode()}
    paths = keyed.client.get("/openapi.json", headers=headers).json()["paths"]
    routes = [(method, path) for path, methods in paths.items() for method in ("HEAD", *map(str.upper, methods))]
    assert len(routes) > 60
    for method, path in routes:
        response = keyed.client.request(method, re.sub(r"{.*?}", "x", path))
        assert (response.status_code == 401) == (path not in PUBLIC_PATHS), (method, path, response.status_code)
        if path.startswith("/v1/messages") and method == "POST":
            assert response.json()["error"]["type"] == "authentication_error"


def test_health_is_open(keyed):
    assert keyed.client.get("/health").status_code == 200


def test_page_takes_the_key_from_its_address_and_other_routes_do_not(keyed):
    assert keyed.client.get("/", params={"key": "first-key"}).status_code == 200
    assert keyed.client.get("/", params={"key": KEYS[1]}).status_code == 200
    assert keyed.client.get("/", params={"key": "wrong"}).status_code == 401
    assert keyed.client.get("/v1/models", params={"key": "first-key"}).status_code == 401


def test_official_client_sends_the_key(keyed):
    with keyed.openai(api_key="first-key") as client:
        assert client.models.list().data[0].id == "tiny"
