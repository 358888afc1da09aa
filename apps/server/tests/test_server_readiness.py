"""/health says whether to start the process again, /ready whether to send it requests."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from websockets.sync.client import connect

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/messages": {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/responses": {"model": "tiny", "input": "x", "max_output_tokens": 2},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {"max_tokens": 2}},
    "/tokenize": {"prompt": "x"},
}


def code_of(live: Any, path: str = "/ready") -> str | None:
    """None for 200."""
    response = live.client.get(path)
    if response.status_code == 200:
        assert response.content == b""
        return None
    assert response.status_code == 503
    code: str = response.json()["error"]["code"]
    return code


@pytest.fixture
def leaving(make_live: Callable[..., Any]) -> Iterator[Any]:
    live = make_live()
    yield live
    live.context.state.is_leaving = live.context.state.is_draining = False


def test_a_server_that_is_about_to_leave(leaving: Any) -> None:
    assert (code_of(leaving), code_of(leaving, "/health")) == (None, None)
    leaving.context.state.is_leaving = True
    assert (code_of(leaving), code_of(leaving, "/health")) == ("draining", None)
    for path, body in BODIES.items():
        response = leaving.post(path, body)
        assert (response.status_code, response.headers["connection"]) == (200, "close"), path


def test_new_requests_are_refused_while_the_server_drains(leaving: Any) -> None:
    leaving.context.state.is_leaving = leaving.context.state.is_draining = True
    for path, body in BODIES.items():
        response = leaving.post(path, body)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1"), path
        error = response.json()["error"]
        assert "shutting down" in error["message"]
        assert path == "/v1/messages" or error["code"] == "draining"
    with connect(leaving.url.replace("http", "ws") + "/v1/responses") as socket:
        socket.send(json.dumps({"type": "response.create", "model": "tiny", "input": "x"}))
        told = json.loads(socket.recv(20))
    assert (told["type"], told["status"], told["error"]["code"]) == ("error", 503, "draining")
    assert code_of(leaving, "/health") is None
    leaving.wait_idle()


def test_an_engine_that_rests(make_live: Callable[..., Any]) -> None:
    live = make_live(enable_sleep_mode=True, enable_admin_routes=True)
    for rest, code, go_on in (("/pause", "paused", "/resume"), ("/sleep?level=0", "paused", "/wake_up")):
        assert live.client.post(rest).status_code == 200
        assert (code_of(live), code_of(live, "/health")) == (code, None), rest
        assert live.client.post(go_on).status_code == 200
        assert code_of(live) is None
    live.context.state.is_asleep = True
    assert (code_of(live), code_of(live, "/health")) == ("sleeping", None)
    live.context.state.is_asleep = False


def test_an_engine_that_is_stalled_is_told_and_recovers(make_live: Callable[..., Any]) -> None:
    live = make_live(engine={"step_time_s": 2.0}, config={"stall_timeout_s": 0.5})
    asking = threading.Thread(target=live.post, args=("/v1/completions", {"prompt": "x", "max_tokens": 1}))
    asking.start()
    end = time.monotonic() + 20
    while (response := live.client.get("/health")).status_code == 200:
        assert time.monotonic() < end
        time.sleep(0.05)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (503, "engine_stalled")
    assert "--stall-timeout-s" in error["message"]
    assert code_of(live) == "engine_stalled"
    asking.join()
    assert (code_of(live), code_of(live, "/health")) == (None, None)
    assert "quire:engine_stalls_total 1.0" in live.client.get("/metrics").text


def test_an_engine_that_is_started_again_and_dies(make_live: Callable[..., Any]) -> None:
    live = make_live(config={"max_restarts": 1})
    os.kill(live.llm.client.pid, signal.SIGKILL)
    end = time.monotonic() + 20
    while (code := code_of(live)) != "loading":
        assert code is None
        assert time.monotonic() < end
        time.sleep(0.005)
    assert code_of(live, "/health") is None, "it helps itself"
    assert live.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
    assert code_of(live) is None
    assert 'quire:engine_restarts_total{reason="SIGKILL"} 1.0' in live.client.get("/metrics").text
    os.kill(live.llm.client.pid, signal.SIGKILL)
    while live.client.get("/health").status_code == 200:
        assert time.monotonic() < end + 20
        time.sleep(0.02)
    assert live.client.get("/ready").status_code == 503
    assert "SIGKILL" in live.client.get("/health").json()["error"]["message"]


def test_probes_need_no_key(make_live: Callable[..., Any]) -> None:
    live = make_live(api_key=("secret",))
    assert (code_of(live), code_of(live, "/health"), code_of(live, "/ping")) == (None, None, None)
    assert live.client.get("/metrics").status_code == 401
