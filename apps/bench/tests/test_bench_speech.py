"""`quire bench speech` against a server of its own making, whose times are known."""

from __future__ import annotations

import asyncio
import json
import threading
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from quire_bench.speech import SpeechLoad, run_speech
from quire_interfaces import ConfigError, QuireError

WAIT_S = 0.1


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four seconds of silence."""
    path = tmp_path_factory.mktemp("sounds") / "four.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(2 * 32_000))
    return path


class Server:
    """Tells one word after `WAIT_S`, the end after twice that, and counts those who wait together."""

    def __init__(self) -> None:
        self.num_running = self.most = 0
        self.fields: dict[str, Any] = {}
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        form = await request.post()
        self.fields = {name: value if isinstance(value, str) else value.file.read() for name, value in form.items()}
        if self.fields.get("language") == "xx":
            return web.json_response({"error": {"message": "no such language"}}, status=400)
        self.num_running += 1
        self.most = max(self.most, self.num_running)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in ({"delta": ""}, {"delta": "word"}, {"type": "transcript.text.done", "text": "word"}):
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(WAIT_S)
        self.num_running -= 1
        return response

    def run(self, ready: threading.Event, stop: threading.Event) -> None:
        async def serve() -> None:
            app = web.Application()
            app.router.add_post("/v1/audio/transcriptions", self.answer)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            ready.set()
            await asyncio.to_thread(stop.wait)
            await runner.cleanup()

        asyncio.run(serve())


@pytest.fixture
def server() -> Iterator[Server]:
    server, ready, stop = Server(), threading.Event(), threading.Event()
    thread = threading.Thread(target=server.run, args=(ready, stop))
    thread.start()
    ready.wait(20)
    yield server
    stop.set()
    thread.join(20)


def test_figures_are_those_of_the_server(server: Server, recording: Path) -> None:
    load = SpeechLoad(files=[recording], base_url=server.url, num_requests=6, max_concurrency=3, language="en")
    figures = run_speech(load)
    assert server.most == 3
    assert server.fields["file"] == recording.read_bytes()
    assert server.fields["language"] == "en"
    assert "model" not in server.fields
    assert figures["sound_s"] == 24.0
    assert figures["wall_s"] >= 2 * 3 * WAIT_S
    assert figures["real_time_factor"] == pytest.approx(figures["wall_s"] / 24)
    assert figures["requests_without_text"] == 0
    assert WAIT_S <= figures["first_text_s"]["p50"] < figures["latency_s"]["p50"] - WAIT_S


def test_what_cannot_run_says_so(server: Server, recording: Path, tmp_path: Path) -> None:
    with pytest.raises(QuireError, match=r"answers 400: .*no such language"):
        run_speech(SpeechLoad(files=[recording], base_url=server.url, language="xx"))
    words = tmp_path / "words.txt"
    words.write_text("no sound")
    with pytest.raises(ConfigError, match="no WAV file"):
        run_speech(SpeechLoad(files=[words], base_url=server.url))
    with pytest.raises(ConfigError, match="at least one"):
        SpeechLoad(files=[])
    with pytest.raises(QuireError, match="does not answer"):
        run_speech(SpeechLoad(files=[recording], base_url="http://127.0.0.1:1"))
