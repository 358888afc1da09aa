"""A server that holds requests, ends them, or forgets what it has computed, when an administrator asks."""

from __future__ import annotations

import concurrent.futures
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

BODY = {"model": "quire-demo", "prompt": list(range(3, 103)), "temperature": 0, "max_tokens": 700, "ignore_eos": True}


@pytest.fixture(scope="module")
def client(quire_serve: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=quire_serve("--enable-admin-routes").url(), timeout=60) as client:
        yield client


def complete(client: httpx.Client, **fields: Any) -> Any:
    response = client.post("/v1/completions", json={**BODY, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def stream(client: httpx.Client, has_begun: threading.Event, **fields: Any) -> Any:
    """A choice like that of `complete`, put together from a stream; says when its first token is there."""
    text, reason = "", None
    with client.stream("POST", "/v1/completions", json={**BODY, **fields, "stream": True}) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            choice = json.loads(line[6:])["choices"][0]
            text, reason = text + choice["text"], choice["finish_reason"]
            has_begun.set()
    return {"text": text, "finish_reason": reason}


def wait_for_load(client: httpx.Client, load: int) -> None:
    deadline_s = time.monotonic() + 60
    while client.get("/load").json() != {"server_load": load}:  # a request ends a little after its answer
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_holds_waits_for_or_ends_what_runs(client: httpx.Client, mode: str) -> None:
    expected = complete(client)["choices"][0]["text"]
    wait_for_load(client, 0)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = pool.submit(stream, client, has_begun := threading.Event())
        assert has_begun.wait(60)
        assert client.post(f"/pause?mode={mode}").json() == {"status": "paused"}
        assert client.get("/is_paused").json() == {"is_paused": True}
        held = pool.submit(complete, client, max_tokens=4)
        time.sleep(0.3)
        assert not held.done()
        assert running.done() is (mode != "keep")
        assert client.get("/health").status_code == 200
        assert client.post("/resume").json() == {"status": "resumed"}
        choice = running.result(60)
        assert (choice["text"] == expected) is (mode != "abort")
        assert choice["finish_reason"] == ("abort" if mode == "abort" else "length")
        usage = held.result(60)["usage"]
        assert usage["completion_tokens"] == 4
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0, "a pause forgets what is cached"
    assert client.get("/is_paused").json() == {"is_paused": False}


def test_cached_prefixes_are_forgotten(client: httpx.Client) -> None:
    def cached_tokens() -> int:
        return int(complete(client, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"])

    cached_tokens()
    assert cached_tokens() > 64
    assert client.post("/pause?mode=wait&clear_cache=false").status_code == 200
    assert client.post("/resume").status_code == 200
    assert cached_tokens() > 64
    assert client.post("/reset_prefix_cache").status_code == 200
    assert cached_tokens() == 0
    expected = complete(client)["choices"][0]["text"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, client, has_begun := threading.Event())
        assert has_begun.wait(60)
        refused = client.post("/reset_prefix_cache")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "busy")
        assert client.post("/reset_prefix_cache?reset_running_requests=true").status_code == 200
        assert not running.done()
        assert running.result(60)["text"] == expected


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/pause?mode=stop", "mode"),
        ("/pause?clear_cache=maybe", "clear_cache"),
        ("/reset_prefix_cache?reset_running_requests=2", "reset_running_requests"),
        ("/reset_prefix_cache?reset_external=true", "reset_external"),
    ],
)
def test_what_cannot_be_is_refused(client: httpx.Client, path: str, param: str) -> None:
    response = client.post(path)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert client.get("/is_paused").json() == {"is_paused": False}


def test_without_the_flag_there_are_no_such_routes(live: Any) -> None:
    for path in ("/pause", "/resume", "/reset_prefix_cache"):
        assert live.client.post(path).status_code == 404
    assert live.client.get("/is_paused").status_code == 404
    assert live.client.get("/load").json() == {"server_load": 0}


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
def test_keys_and_values_of_others_are_refused(live: Any, route: str) -> None:
    params = {"max_tokens": 1}
    messages = [{"role": "user", "content": "a"}]
    body = {"prompt": "a", "messages": messages, "token_ids": [3], **params, "sampling_params": params}
    response = live.client.post(route, json={**body, "kv_transfer_params": {"do_remote_decode": True}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "kv_transfer_params")
    assert live.client.post(route, json={**body, "kv_transfer_params": None}).status_code == 200
