"""What clients, probes and scrapers see when a request, a client's line or the engine process fails."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from quire_renderers import load_tokenizer

FAULTS = {"fails": "¤", "raises": "¥", "exits": "¦"}
"""Fault -> text whose last token asks for it."""


@pytest.fixture(scope="module")
def make_faulty(make_live: Callable[..., Any], tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Starts servers whose engine fails as its prompts ask."""
    tokenizer = load_tokenizer(tiny_folder)
    faults = {name: tokenizer.encode(text, add_special_tokens=False)[-1] for name, text in FAULTS.items()}
    assert len(set(faults.values())) == 3

    def make(*, engine: dict[str, Any] | None = None, **arguments: Any) -> Any:
        marker = str(tmp_path_factory.mktemp("engine") / "was-started")
        settings = {"faults": faults, "marker": marker, **(engine or {})}
        return make_live(factory="server_faulty_engine:factory", engine=settings, **arguments)

    with pytest.MonkeyPatch.context() as patch:
        # Engine processes import the factory from here, also those that are started again.
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        yield make


@pytest.fixture(scope="module")
def faulty(make_faulty: Any) -> Any:
    return make_faulty(engine={"step_time_s": 0.005})


def body_of(path: str, text: str, max_tokens: int = 40, **more: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    return {**asked, "max_tokens": max_tokens, "ignore_eos": True, **more}


class Scrape:
    """The metrics of one moment, as a scraper reads them."""

    def __init__(self, live: Any) -> None:
        response = live.client.get("/metrics")
        assert response.status_code == 200
        self._lines = response.text.splitlines()

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples with these labels."""
        lines = [line for line in self._lines if re.match(rf"quire:{name}[{{ ]", line)]
        assert lines, name
        wanted = [line for line in lines if all(f'{key}="{value}"' in line for key, value in labels.items())]
        return sum(float(line.rsplit(" ", 1)[1]) for line in wanted)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(("fault", "message"), [("fails", "asked to fail"), ("raises", "broke the step")])
def test_one_failing_request_is_a_500_while_the_others_go_on(faulty: Any, path: str, fault: str, message: str) -> None:
    failed_before = Scrape(faulty).value("request_success_total", finished_reason="error")
    texts = [f"number {i}" for i in range(10)]
    texts[4] += f" {FAULTS[fault]}"

    async def ask_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=faulty.url, timeout=60) as client:
            return await asyncio.gather(*(client.post(path, json=body_of(path, text)) for text in texts))

    responses = asyncio.run(ask_all())
    for number, response in enumerate(responses):
        if number != 4:
            assert response.status_code == 200, response.text
            assert response.json()["usage"]["completion_tokens"] == 40
    assert responses[4].status_code == 500
    error = responses[4].json()["error"]
    assert (error["code"], error["type"], error["param"]) == ("generation_failed", "internal_error", None)
    assert message in error["message"]
    assert "Traceback" not in error["message"]
    assert Scrape(faulty).value("request_success_total", finished_reason="error") == failed_before + 1
    assert faulty.client.get("/health").status_code == 200
    faulty.wait_idle()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_that_fails_before_its_first_token_has_the_status(faulty: Any, path: str) -> None:
    response = faulty.post(path, body_of(path, f"x {FAULTS['fails']}", stream=True))
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "generation_failed"
    faulty.wait_idle()


def test_one_failing_prompt_of_a_list_fails_the_request_and_stops_the_others(faulty: Any) -> None:
    prompts = ["a", f"b {FAULTS['fails']}", "c"]
    response = faulty.post("/v1/completions", {"prompt": prompts, "max_tokens": 400, "ignore_eos": True})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "generation_failed"
    faulty.wait_idle(5)
    streamed = faulty.post(
        "/v1/completions", {"prompt": prompts, "max_tokens": 400, "ignore_eos": True, "stream": True}
    )
    if streamed.status_code == 200:  # another prompt had its first token before
        *_, last, done, end = streamed.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "generation_failed"
    else:
        assert streamed.status_code == 500
    faulty.wait_idle(5)


# A body that arrives too slowly.


class Line:
    """A connection by hand."""

    def __init__(self, live: Any) -> None:
        host, port = live.url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=20)

    def begin(self, *headers: str) -> None:
        lines = ["POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json", *headers, "", ""]
        self.socket.sendall("\r\n".join(lines).encode())

    def answer(self) -> bytes:
        """Everything until the server closes."""
        data = b""
        while part := self.socket.recv(65536):
            data += part
        return data


@pytest.fixture
def line(impatient: Any) -> Iterator[Line]:
    line = Line(impatient)
    with line.socket:
        yield line


@pytest.fixture(scope="module")
def impatient(make_live: Callable[..., Any]) -> Any:
    return make_live(body_timeout_s=0.6)


def assert_timed_out(answer: bytes) -> None:
    head, _, content = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408"), answer
    error = json.loads(content)["error"]
    assert (error["code"], error["type"]) == ("timeout", "invalid_request_error")
    assert "0.6 s" in error["message"]
    assert "--body-timeout-s" in error["message"]


def test_a_body_that_never_comes(line: Line, impatient: Any) -> None:
    line.begin("content-length: 1000")
    start = time.monotonic()
    assert_timed_out(line.answer())
    assert time.monotonic() - start > 0.5
    impatient.wait_idle()


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_drips(line: Line, impatient: Any, chunked: bool) -> None:
    line.begin("transfer-encoding: chunked" if chunked else "content-length: 100000")
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.05):
            try:
                line.socket.sendall(b"1\r\n \r\n" if chunked else b" ")
            except OSError:
                return

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        # Others are served meanwhile, and steady progress is no excuse: the bound is on the whole body.
        assert impatient.post("/v1/completions", {"prompt": "x", "max_tokens": 3}).status_code == 200
        head = b""
        while b"\r\n\r\n" not in head or not head.endswith(b"}"):
            part = line.socket.recv(65536)
            assert part, head
            head += part
    finally:
        stop.set()
        dripping.join()
    assert_timed_out(head)
    impatient.wait_idle()


def test_a_body_in_time_in_several_pieces(line: Line) -> None:
    content = json.dumps({"prompt": "x", "max_tokens": 2, "ignore_eos": True}).encode()
    line.begin(f"content-length: {len(content)}", "connection: close")
    for start in range(0, len(content), 20):
        line.socket.sendall(content[start : start + 20])
        time.sleep(0.03)
    assert line.answer().startswith(b"HTTP/1.1 200")


# The engine process.


class Stream(threading.Thread):
    """A streaming client; `begun` is set with the first bytes."""

    def __init__(self, live: Any, max_tokens: int) -> None:
        super().__init__()
        self._live, self._max_tokens = live, max_tokens
        self.begun = threading.Event()
        self.text = ""
        self.start()
        assert self.begun.wait(30)

    def run(self) -> None:
        body = body_of("", "some words", self._max_tokens, stream=True, stream_options={"include_usage": True})
        with self._live.client.stream("POST", "/v1/completions", json=body) as response:
            for part in response.iter_text():
                self.text += part
                self.begun.set()

    def last_event(self) -> dict[str, Any]:
        self.join(60)
        *_, last, done, end = self.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        event: dict[str, Any] = json.loads(last.removeprefix("data: "))
        return event


def test_an_engine_that_is_dead_for_good(make_faulty: Any) -> None:
    live = make_faulty(engine={"step_time_s": 0.01}, config={"max_restarts": 0})
    live.post("/v1/completions", body_of("", "x", 30))
    assert Scrape(live).value("generation_tokens_total") == 30
    stream, text = Stream(live, 400), [{"role": "user", "content": "some words"}]
    with live.anthropic() as client:
        ask = {"model": "tiny", "messages": text, "max_tokens": 400}
        with client.messages.create(stream=True, extra_body={"ignore_eos": True}, **ask) as events:
            assert next(events).type == "message_start"
            os.kill(live.llm.client.pid, signal.SIGKILL)
            with pytest.raises(anthropic.APIStatusError, match="SIGKILL") as caught:
                list(events)
            assert (caught.value.body["type"], caught.value.body["error"]["type"]) == ("error", "overloaded_error")
            assert caught.value.body["request_id"] == events.response.headers["request-id"]
        with pytest.raises(anthropic.InternalServerError, match="SIGKILL") as caught:
            client.messages.create(**ask)
        assert (caught.value.status_code, caught.value.body["error"]["type"]) == (503, "overloaded_error")
    assert "SIGKILL" in stream.last_event()["error"]["message"]
    health = live.client.get("/health")
    assert health.status_code == 503
    assert health.json()["error"]["type"] == "service_unavailable_error"
    assert "SIGKILL" in health.json()["error"]["message"]
    # What was counted can still be read, and nobody is said to run.
    scrape = Scrape(live)
    assert scrape.value("generation_tokens_total") >= 30
    assert scrape.value("num_requests_running") == scrape.value("num_requests_waiting") == 0
    assert scrape.value("request_success_total", finished_reason="error") == 2
    refused = live.post("/v1/completions", body_of("", "x"))
    assert refused.status_code == 503
    assert "SIGKILL" in refused.json()["error"]["message"]
    assert live.client.get("/v1/models").status_code == 200


def test_an_engine_that_is_started_again(make_faulty: Any) -> None:
    live = make_faulty(engine={"step_time_s": 0.01, "restart_s": 3.0}, config={"max_restarts": 1})
    live.post("/v1/completions", body_of("", "x", 30))
    stream = Stream(live, 150)
    first_pid = live.llm.client.pid
    os.kill(first_pid, signal.SIGKILL)
    end = time.monotonic() + 60
    while live.llm.client.pid == first_pid:
        assert time.monotonic() < end
        time.sleep(0.01)
    # While it loads: requests wait, probes and scrapers get their answers.
    assert live.client.get("/health").status_code == 200
    meanwhile = Scrape(live)
    assert meanwhile.value("generation_tokens_total") >= 30
    assert (meanwhile.value("num_requests_running"), meanwhile.value("num_requests_waiting")) == (0, 1)
    assert not stream.text.endswith("[DONE]\n\n"), "otherwise this test looked too late"
    late = live.post("/v1/completions", body_of("", "late", 5))
    assert (late.status_code, late.json()["usage"]["completion_tokens"]) == (200, 5)
    assert stream.last_event()["usage"]["completion_tokens"] == 150
    assert live.client.get("/health").status_code == 200
    # Counters go on: at most what the dead process had not told yet is missing.
    assert 30 + 100 < Scrape(live).value("generation_tokens_total") <= 30 + 150 + 5
    live.wait_idle()


def test_a_request_that_kills_every_engine_it_meets(make_faulty: Any) -> None:
    live = make_faulty(config={"max_restarts": 3})
    killer = live.post("/v1/completions", body_of("", f"x {FAULTS['exits']}"))
    assert killer.status_code == 500
    assert killer.json()["error"]["code"] == "generation_failed"
    assert "exit status 3" in killer.json()["error"]["message"]
    assert live.client.get("/health").status_code == 200
    assert live.post("/v1/completions", body_of("", "x")).status_code == 200
    live.wait_idle()
