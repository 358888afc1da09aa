"""Flags of vLLM that change what every answer says, or how a stream is kept: fingerprint, role, comments, documents."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from quire_interfaces import ConfigError
from quire_server.keep_alive import KeepAlive, await_stream

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "ignore_eos": True}
COMMENT = ": keep-alive"


@pytest.fixture(scope="module")
def server(make_live: Any) -> Any:
    return make_live(
        enable_admin_routes=True,
        sse_keep_alive_interval=0.1,
        fingerprint_mode="full",
        response_role="bot",
        disable_fastapi_docs=True,
    )


def test_answers_have_the_fingerprint_and_the_role(server: Any, make_live: Any) -> None:
    url = server.url + "/v1/chat/completions"
    chat = httpx.post(url, json=CHAT).json()  # official clients know one role only
    plain = server.client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1}).json()
    assert re.fullmatch(r"quire-[\d.]+-[0-9a-f]{8}", chat["system_fingerprint"])
    assert plain["system_fingerprint"] == chat["system_fingerprint"]
    assert chat["choices"][0]["message"]["role"] == "bot"
    text = httpx.post(url, json={**CHAT, "stream": True}).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert {chunk["system_fingerprint"] for chunk in chunks} == {chat["system_fingerprint"]}
    assert chunks[0]["choices"][0]["delta"]["role"] == "bot"
    other = make_live(fingerprint_mode="custom", fingerprint_value="ours-7")
    assert other.client.post("/v1/chat/completions", json=CHAT).json()["system_fingerprint"] == "ours-7"
    assert other.client.get("/openapi.json").status_code == 200
    assert server.client.get("/openapi.json").status_code == 404
    with pytest.raises(ConfigError, match="set both, or neither"):
        make_live(fingerprint_mode="custom")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
def test_a_stream_that_waits_gets_comments(path: str, server: Any) -> None:
    body: dict[str, Any] = {"model": "tiny", "stream": True, "max_tokens": 2}
    body |= {"prompt": "Hi"} if path == "/v1/completions" else {"messages": CHAT["messages"]}
    if path == "/v1/responses":
        body = {"model": "tiny", "stream": True, "max_output_tokens": 2, "input": "Hi"}
    assert server.client.post("/pause?mode=keep&clear_cache=false").status_code == 200
    num_comments, lines = 0, []
    with httpx.stream("POST", server.url + path, json=body, timeout=30) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-request-id"]
        for line in response.iter_lines():
            num_comments += line == COMMENT
            if num_comments == 2 and line == COMMENT:
                with httpx.Client(base_url=server.url) as other:
                    assert other.post("/resume").status_code == 200
            lines.append(line)
    events = [line for line in lines if line.startswith("data: {")]
    assert num_comments >= 2
    assert lines.index(COMMENT) < lines.index(events[0])
    assert events
    assert "error" not in json.loads(events[-1][6:])


def ask(app: Callable[[Scope, Receive, Send], Awaitable[None]], path: str) -> list[Message]:
    """What is sent to a client of this app, behind the layer."""
    sent: list[Message] = []

    async def run() -> None:
        async def receive() -> Message:
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": []}
        await KeepAlive(app, 0.01)(scope, receive, send)

    anyio.run(run)
    return sent


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/chat/completions", b'data: {"error": {"message": "no", "code": "busy"}}\n\ndata: [DONE]\n\n'),
        ("/v1/messages", b'event: error\ndata: {"error": {"message": "no", "code": "busy"}}\n\n'),
        (
            "/v1/responses",
            b'event: error\ndata: {"type": "error", "sequence_number": 0, "code": "busy", "message": "no", '
            b'"param": null}\n\n',
        ),
    ],
)
def test_a_refusal_after_the_first_comment_is_the_last_event(path: str, last: bytes) -> None:

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await_stream()
        await anyio.sleep(0.05)
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"error": {"message": "no", ', "more_body": True})
        await send({"type": "http.response.body", "body": b'"code": "busy"}}'})

    start, *bodies = ask(app, path)
    assert start["status"] == 200
    assert [each["body"] for each in bodies] == [b": keep-alive\n\n"] * (len(bodies) - 1) + [last]
    assert not bodies[-1].get("more_body", False)


def test_what_is_no_stream_gets_no_comment() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(0.05)
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})
        await anyio.sleep(0.05)
        await send({"type": "http.response.body", "body": b"}"})

    start, *bodies = ask(app, "/v1/chat/completions")
    assert start["status"] == 200
    assert [each["body"] for each in bodies] == [b"{", b"}"]
