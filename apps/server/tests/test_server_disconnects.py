"""Clients that go away: their requests end within a step, whatever they asked for and wherever they were."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from typing import Any

import pytest

MESSAGES = [{"role": "user", "content": "the quire gathers twelve blocks of paper"}]
ENDLESS: dict[str, Any] = {"max_tokens": 3000, "ignore_eos": True}


@pytest.fixture(scope="module")
def slow(make_live):
    """Steps take 20 ms: a request that is not aborted would run for a minute."""
    return make_live(
        engine={"max_model_len": 4096, "num_blocks": 2048, "max_num_seqs": 48, "step_time_s": 0.02, "check_kv": False}
    )


async def post(url: str, path: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request by hand, so that the connection can be cut in any way."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    await writer.drain()
    return reader, writer


async def cut(writer: asyncio.StreamWriter, *, reset: bool) -> None:
    """Close in order, or as a crashed machine does."""
    if reset:
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def test_two_hundred_clients_leave_in_the_middle_of_their_streams(slow):
    async def one(number: int) -> None:
        chat = number % 3 > 0
        body = {**ENDLESS, "stream": True, "n": 1 + (number % 7 == 0)}
        body |= {"messages": MESSAGES} if chat else {"prompt": ["some words", "and others"]}
        reader, writer = await post(slow.url, "/v1/chat/completions" if chat else "/v1/completions", body)
        if number % 4:
            # Others take the places of those who leave, so everyone sees a first event in the end.
            assert b" 200 " in await reader.readline()
            await reader.readuntil(b"data: ")
            await reader.readuntil(b"\n\n")
        await cut(writer, reset=number % 2 == 0)

    async def all_of_them() -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(*(one(number) for number in range(200)))

    asyncio.run(all_of_them())
    slow.wait_idle(20)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "n": 3}),
        ("/v1/completions", {"prompt": ["a b c", "d e f"], "n": 2}),
        ("/v1/chat/completions/batch", {"messages": [MESSAGES, MESSAGES]}),
        ("/v1/messages", {"messages": MESSAGES}),
        ("/v1/responses", {"input": "a b c", "max_output_tokens": ENDLESS["max_tokens"]}),
        ("/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": ENDLESS}),
    ],
)
def test_client_leaves_while_it_waits_for_a_whole_answer(slow, path, body, reset):
    async def leave() -> None:
        _, writer = await post(slow.url, path, {**ENDLESS, **body})
        await asyncio.sleep(0.3)
        await cut(writer, reset=reset)

    asyncio.run(leave())
    slow.wait_idle(20)


def test_client_leaves_in_the_middle_of_its_body(slow):
    async def leave() -> None:
        host, port = slow.url.removeprefix("http://").split(":")
        for reset in (False, True):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
            await writer.drain()
            await asyncio.sleep(0.1)
            await cut(writer, reset=reset)

    asyncio.run(leave())
    slow.wait_idle(20)


def test_client_that_does_not_read_holds_up_nobody(slow):
    async def stall() -> None:
        _, writer = await post(slow.url, "/v1/chat/completions", {**ENDLESS, "messages": MESSAGES, "stream": True})
        writer.transport.pause_reading()
        reader, other = await post(slow.url, "/v1/completions", {"prompt": "x", "max_tokens": 5, "ignore_eos": True})
        async with asyncio.timeout(20):
            assert b"200 OK" in await reader.readline()
        await cut(other, reset=False)
        await cut(writer, reset=True)

    asyncio.run(stall())
    slow.wait_idle(20)


def test_one_refused_prompt_of_a_list_stops_the_others(make_live):
    live = make_live(
        engine={
            "max_model_len": 4096, "max_num_seqs": 1, "max_queued_requests": 2, "step_time_s": 0.02, "check_kv": False,
        }
    )  # fmt: skip
    body = {**ENDLESS, "prompt": ["a", "b", "c", "d", "e"]}
    response = live.post("/v1/completions", body)
    assert response.status_code == 429, response.text
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["type"] == "rate_limit_error"
    live.wait_idle(20)
    streamed = live.post("/v1/completions", {**body, "stream": True})
    if streamed.status_code == 200:  # the first prompt began before the last was refused
        *_, last, done, end = streamed.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "rate_limit_error"
    else:
        assert streamed.status_code == 429
    live.wait_idle(20)
