"""Other people's servers: what they are sent; whatever they answer is a figure or a counted failure, never a crash."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from quire_bench import BenchRequest
from quire_bench.serve import ServeLoad, Timing, run_serve, summarize
from quire_interfaces import QuireError

REQUESTS = [BenchRequest([11, 12, 13], 4), BenchRequest([14], 2)]
TOKEN = {"choices": [{"index": 0, "text": "a"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}}


@asynccontextmanager
async def server(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    app.router.add_get("/v1/models", name_models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def name_models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "theirs"}, {"id": "another"}]})


def streaming(*parts: bytes) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0)
        return response

    return handler


def event(value: Any) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


async def measure(url: str, **settings: Any) -> list[Timing]:
    timings, _ = await run_serve(ServeLoad(base_url=url, **settings), REQUESTS)
    return timings


async def test_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    seen: list[tuple[dict[str, Any], str | None]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append((await request.json(), request.headers.get("Authorization")))
        return await streaming(event(TOKEN), event(USAGE), DONE)(request)

    async with server(handler) as url:
        await measure(url, max_concurrency=1, extra_body={"top_k": 3})
        await measure(url, max_concurrency=1, api_key="mine", model="named")
    bodies = [body for body, _ in seen]
    assert [body["prompt"] for body in bodies[:2]] == [[11, 12, 13], [14]]
    assert [body["max_tokens"] for body in bodies[:2]] == [4, 2]
    assert all(body["ignore_eos"] and body["stream"] and body["temperature"] == 0 for body in bodies)
    assert bodies[0]["top_k"] == 3
    assert [body["model"] for body in bodies] == ["theirs", "theirs", "named", "named"]
    assert [key for _, key in seen] == [None, None, "Bearer mine", "Bearer mine"]


async def test_a_server_that_counts_and_one_that_does_not() -> None:
    async with server(streaming(event(TOKEN), event(TOKEN), event(USAGE), DONE)) as url:
        timings = await measure(url)
    assert [(timing.num_output_tokens, len(timing.gaps_s)) for timing in timings] == [(9, 1), (9, 1)]
    async with server(streaming(b": hello\n\n", event(TOKEN)[:9], event(TOKEN)[9:], b"data:[DONE]\n\n")) as url:
        timings = await measure(url)
    assert [(timing.num_output_tokens, timing.error) for timing in timings] == [(1, None), (1, None)]
    figures = summarize(timings, 1.0)
    assert figures["num_other_length"] == 2
    assert figures["num_failed"] == 0


@pytest.mark.parametrize(
    ("parts", "failure"),
    [
        ((), "the stream broke off before its end"),
        ((event(TOKEN),), "the stream broke off before its end"),
        ((event(TOKEN), event({"error": {"message": "out of memory"}}), DONE), "out of memory"),
        ((event([1]), DONE), "error in the stream: [1]"),
        ((b"data: {oops\n\n", DONE), "JSONDecodeError"),
        ((event({"choices": [], "usage": {"completion_tokens": "many"}}), DONE), "ValueError"),
        ((event({"choices": [{"text": "a" * 3_000_000}]}), DONE), "LineTooLong"),
    ],
)
async def test_broken_streams_are_failures(parts: tuple[bytes, ...], failure: str) -> None:
    async with server(streaming(*parts)) as url:
        timings = await measure(url)
    for timing in timings:
        assert timing.error is not None
        assert failure in timing.error
        assert timing.total_s is not None
    assert summarize(timings, 1.0)["num_failed"] == 2


async def test_one_failure_among_good_ones() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if (await request.json())["max_tokens"] == 2:
            return web.Response(status=503, text="too busy\xff")
        return await streaming(event(TOKEN), DONE)(request)

    async with server(handler) as url:
        figures = summarize(await measure(url), 1.0)
    assert figures["num_failed"] == 1
    assert figures["most_common_failure"].startswith("HTTP 503: too busy")
    assert figures["input_tokens"] == 3


async def test_the_whole_run_is_bounded() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if (await request.json())["max_tokens"] == 4:
            return await streaming(event(TOKEN), DONE)(request)
        await asyncio.sleep(600)
        raise AssertionError

    async with server(handler) as url:
        timings, wall_s = await run_serve(ServeLoad(base_url=url, timeout_s=3.0, max_concurrency=1), REQUESTS * 3)
    assert wall_s >= 3
    assert timings[0].error is None
    assert {timing.error for timing in timings[1:]} == {"not finished when the run's 3 s were over"}


async def test_concurrency_is_bounded() -> None:
    running = most = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return await streaming(event(TOKEN), DONE)(request)

    async with server(handler) as url:
        await run_serve(ServeLoad(base_url=url, max_concurrency=3), REQUESTS * 6)
        assert most == 3
        await run_serve(ServeLoad(base_url=url), REQUESTS * 6)
    assert most > 3


async def test_waiting_for_a_place_counts_when_there_is_a_rate() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.1)
        return await streaming(event(TOKEN), DONE)(request)

    async with server(handler) as url:
        load = ServeLoad(base_url=url, request_rate=1000, max_concurrency=1)
        timings, _ = await run_serve(load, REQUESTS * 2)
    assert timings[-1].total_s is not None
    assert timings[-1].total_s > 0.35


@pytest.mark.parametrize(("status", "message"), [(401, "wants an API key"), (404, "no OpenAI-compatible server")])
async def test_an_address_that_names_no_model(status: int, message: str) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=status, text="no")

    app = web.Application()
    app.router.add_get("/v1/models", refuse)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        with pytest.raises(QuireError, match=message):
            await run_serve(ServeLoad(base_url=f"http://127.0.0.1:{runner.addresses[0][1]}"), REQUESTS)
    finally:
        await runner.cleanup()
