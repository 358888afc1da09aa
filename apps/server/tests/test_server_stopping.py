"""How a server ends: by signals at any moment of its life, with load balancers told first and streams ended whole."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from quire_server.exit_status import ExitStatus, exit_status_of

MESSAGES = [{"role": "user", "content": "hello"}]


def engines_of(process: Any) -> list[psutil.Process]:
    return psutil.Process(process.popen.pid).children(recursive=True)


def wait_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []


class Commands:
    """Runs `quire serve` and sends it a signal after a while."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def end_after(self, seconds: float, number: int, *flags: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "quire_server.cli", "serve", "--port", "0", "--response-store", "none", *flags]
        popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._started.append(popen)
        while not _handles(popen.pid, number):  # the interpreter itself starts, which nobody can help
            time.sleep(0.002)
        time.sleep(seconds)
        children = psutil.Process(popen.pid).children(recursive=True)
        popen.send_signal(number)
        output, _ = popen.communicate(timeout=60)
        wait_gone(children)
        return popen.returncode, output

    def kill(self) -> None:
        for popen in self._started:
            popen.kill()


def _handles(pid: int, number: int) -> bool:
    """Whether the process has a handler for SIGTERM and its own for `number`."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1 and caught >> (number - 1) & 1)


@pytest.fixture
def commands() -> Iterator[Commands]:
    commands = Commands()
    yield commands
    commands.kill()


@pytest.mark.parametrize(
    ("number", "seconds"),
    [(signal.SIGTERM, seconds) for seconds in (0.0, 0.2, 0.6, 1.2, 2.5, 5.0)] + [(signal.SIGINT, 0.4)],
)
def test_a_signal_at_any_moment_of_loading(commands: Commands, number: int, seconds: float) -> None:
    # From the imports over the engine's process, its weights and its kernels to the first requests.
    status, output = commands.end_after(seconds, number)
    assert status == ExitStatus.OK, output
    assert "Traceback" not in output
    assert "Exception" not in output


def test_a_signal_while_the_engine_hangs_in_loading(launch, tmp_path):
    socket_path = tmp_path / "socket"
    process = launch({"fault": "hang"}, server={"uds": str(socket_path)})
    process.wait_for("loads")
    while not (engines := engines_of(process)):
        time.sleep(0.02)
    assert socket_path.exists()
    process.popen.send_signal(signal.SIGTERM)
    assert process.end(30) == ExitStatus.OK
    wait_gone(engines)
    assert not socket_path.exists()


def test_an_engine_whose_parent_is_killed_ends(launch):
    for engine in ({}, {"fault": "hang"}):
        process = launch(engine)
        process.wait_for("OpenAI API:" if not engine else "loads")
        while not (engines := engines_of(process)):
            time.sleep(0.02)
        process.popen.kill()
        wait_gone(engines)


class Streams:
    """Streaming clients of every protocol."""

    def __init__(self, url: str, bodies: dict[str, dict[str, Any]]) -> None:
        self.texts = dict.fromkeys(bodies, "")
        self._has_begun = {path: threading.Event() for path in bodies}
        self._threads = [threading.Thread(target=self._read, args=(url, path, body)) for path, body in bodies.items()]
        for thread in self._threads:
            thread.start()
        for begun in self._has_begun.values():
            assert begun.wait(60)

    def _read(self, url: str, path: str, body: dict[str, Any]) -> None:
        with httpx.stream("POST", url + path, json={**body, "stream": True}, timeout=60) as response:
            for part in response.iter_text():
                self.texts[path] += part
                if self.texts[path].count("data: ") > 3:
                    self._has_begun[path].set()

    def events(self, path: str) -> list[Any]:
        """All of one stream, once all have ended."""
        for thread in self._threads:
            thread.join(60)
        lines = [line.removeprefix("data: ") for line in self.texts[path].splitlines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


LONG = {
    "/v1/chat/completions": {"messages": MESSAGES, "ignore_eos": True, "max_tokens": 400},
    "/v1/completions": {"prompt": "hello", "ignore_eos": True, "max_tokens": 400},
    "/v1/messages": {"model": "m", "messages": MESSAGES, "ignore_eos": True, "max_tokens": 400},
    "/v1/responses": {"input": "hello", "ignore_eos": True, "max_output_tokens": 400},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"ignore_eos": True, "max_tokens": 400}},
}


def test_streams_that_do_not_end_in_time_end_whole(launch):
    process = launch(
        {"step_time_s": 0.1}, shutdown_timeout_s=1, server={"response_store": ":memory:", "served_model_name": ["m"]}
    )
    streams = Streams(process.url(), LONG)
    process.popen.send_signal(signal.SIGTERM)
    assert process.end(30) == ExitStatus.OK, process.output
    *_, last, done = streams.events("/v1/chat/completions")
    assert (last["choices"][0]["finish_reason"], done) == ("abort", "[DONE]")
    *_, last, done = streams.events("/v1/completions")
    assert (last["choices"][0]["finish_reason"], done) == ("abort", "[DONE]")
    *_, last, done = streams.events("/inference/v1/generate")
    assert (last["choices"][0]["finish_reason"], done) == ("abort", "[DONE]")
    *_, delta, stop = streams.events("/v1/messages")
    assert (delta["type"], delta["delta"]["stop_reason"]) == ("message_delta", "pause_turn")
    assert stop == {"type": "message_stop"}
    *_, item, end = streams.events("/v1/responses")
    assert (item["type"], item["item"]["status"]) == ("response.output_item.done", "incomplete")
    assert (end["type"], end["response"]["status"]) == ("response.incomplete", "incomplete")
    assert end["response"]["error"]["code"] == "server_error"
    assert end["response"]["output"][0]["content"][0]["text"]
    assert "stopping: 5 requests are being answered and have 1 s to finish" in process.output
    assert "5 requests were not done within --shutdown-timeout-s=1: ended" in process.output
    assert "Traceback" not in process.output


def texts_until_closed(socket: ClientConnection) -> list[str | bytes]:
    texts = []
    with contextlib.suppress(ConnectionClosed):
        while True:
            texts.append(socket.recv(20))
    return texts


def test_websockets_are_told_the_rest_of_their_answer(launch):
    process = launch({"step_time_s": 0.05}, server={"response_store": ":memory:"})
    address = process.url().replace("http", "ws") + "/v1/responses"
    with connect(address) as idle, connect(address) as busy:
        busy.send(
            json.dumps({"type": "response.create", "input": "hello", "ignore_eos": True, "max_output_tokens": 60})
        )
        kinds = [json.loads(busy.recv(20))["type"]]
        process.popen.send_signal(signal.SIGTERM)
        kinds += [json.loads(text)["type"] for text in texts_until_closed(busy)]
        assert kinds[-1] == "response.incomplete", "after 60 tokens, which is what it asked for"
        assert kinds.count("response.output_text.delta") > 30
        assert texts_until_closed(idle) == []
        assert (busy.close_code, idle.close_code) == (1012, 1012)
    assert process.end(30) == ExitStatus.OK, process.output
    assert "ended" not in process.output


def test_load_balancers_are_told_before_the_listener_closes(launch):
    process = launch({"step_time_s": 0.02}, server={"drain_delay_s": 3.0})
    url = process.url()
    with httpx.Client(base_url=url) as kept:
        assert kept.get("/ready").status_code == 200
        assert kept.get("/ready").headers.get("connection") != "close"
        process.popen.send_signal(signal.SIGTERM)
        process.wait_for("stopping: 0 requests")
        told = kept.get("/ready")
        assert (told.status_code, told.json()["error"]["code"]) == (503, "draining")
        assert told.headers["connection"] == "close"
    assert httpx.get(f"{url}/health").status_code == 200, "it lives"
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "late", "max_tokens": 3})
    assert answer.status_code == 200, "who has not heard of it yet is served"
    assert process.end(30) == ExitStatus.OK
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/health")


def test_ctrl_c_does_not_wait_for_load_balancers(launch):
    process = launch(server={"drain_delay_s": 60.0})
    process.url()
    process.popen.send_signal(signal.SIGINT)
    assert process.end(30) == ExitStatus.OK


def test_new_requests_are_refused_while_running_ones_finish(launch):
    process = launch({"step_time_s": 0.05})
    url = process.url()
    streams = Streams(url, {path: {**LONG[path], "max_tokens": 60} for path in ("/v1/chat/completions",)})
    # A connection whose request is under way when the listener closes brings another one.
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=20) as late:
        late.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
        time.sleep(0.2)
        process.popen.send_signal(signal.SIGTERM)
        process.wait_for("stopping: 1 requests")
        time.sleep(0.3)
        content = json.dumps({"prompt": "late", "max_tokens": 3}).encode()
        head = f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        try:
            late.sendall(head.encode() + content)
            answer = late.recv(65536)
        except ConnectionError:  # nobody took anything of it
            answer = b""
    assert not answer.startswith(b"HTTP/1.1 200"), answer
    assert streams.events("/v1/chat/completions")[-2]["choices"][0]["finish_reason"] == "length"
    assert process.end(30) == ExitStatus.OK


def test_a_second_signal_ends_the_process_at_once(launch):
    process = launch({"step_time_s": 8.0})  # a step that nothing interrupts
    url = process.url()
    threading.Thread(target=lambda: _ignoring_the_end(url)).start()
    while httpx.get(f"{url}/load").json()["server_load"] == 0:
        time.sleep(0.02)
    engines = engines_of(process)
    process.popen.send_signal(signal.SIGINT)
    process.wait_for("stopping: 1 requests")
    process.popen.send_signal(signal.SIGINT)
    start = time.monotonic()
    assert process.end(30) == ExitStatus.OK
    wait_gone(engines)
    assert time.monotonic() - start < 7, "the step was waited for"
    assert "Traceback" not in process.output


def _ignoring_the_end(url: str) -> None:
    with pytest.raises(httpx.HTTPError):
        httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 9, "ignore_eos": True}, timeout=60)


def test_exit_statuses_are_documented() -> None:
    from quire_interfaces import CheckpointError, ConfigError, EngineDeadError
    from quire_server.exit_status import CannotListenError, EngineStartError

    kinds = (CheckpointError, ConfigError, CannotListenError, EngineStartError, EngineDeadError)
    assert [exit_status_of(kind("x")) for kind in kinds] == [1, 2, 3, 4, 5]
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text(encoding="utf-8")
    for status in ExitStatus:
        assert f"| {int(status)} |" in page
