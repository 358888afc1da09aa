"""The whole server as a process: its start, its end by signals, what it loads, how it fails."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import httpx
import psutil
import pytest

from quire_server.exit_status import ExitStatus

MESSAGES = [{"role": "user", "content": "hello"}]


class Reader(threading.Thread):
    """One streaming client."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__()
        self._url, self._body = url, body
        self.has_begun = threading.Event()
        self.text = ""
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with (
                httpx.Client(base_url=self._url, timeout=60) as client,
                client.stream("POST", "/v1/chat/completions", json={**self._body, "stream": True}) as response,
            ):
                for part in response.iter_text():
                    self.text += part
                    self.has_begun.set()
        except Exception as error:
            self.error = error
        self.has_begun.set()


def readers(url: str, count: int, **body: Any) -> list[Reader]:
    result = [Reader(url, {"messages": MESSAGES, "ignore_eos": True, **body}) for _ in range(count)]
    for reader in result:
        reader.start()
    for reader in result:
        assert reader.has_begun.wait(60)
    return result


def test_sigterm_during_fifty_streams(launch):
    process = launch({"step_time_s": 0.03})
    url = process.url()
    memory = psutil.Process(process.popen.pid).memory_info().rss
    streams = readers(url, 50, max_tokens=80)
    kept = httpx.Client(base_url=url)
    assert kept.get("/health").status_code == 200
    process.popen.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/health")
    for stream in streams:
        stream.join(60)
        assert stream.error is None
        assert stream.text.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"length"' in stream.text
    assert process.end() == 0, process.output
    kept.close()
    assert "heavy modules: []" in process.output
    assert memory < 160e6
    assert "Traceback" not in process.output


def test_drain_has_a_deadline_and_a_second_signal_does_not_wait(launch):
    for settings, signals in (({"shutdown_timeout_s": 1}, 1), ({}, 2)):
        process = launch({"step_time_s": 0.2}, **settings)
        (stream,) = readers(process.url(), 1, max_tokens=400)
        for _ in range(signals):
            process.popen.send_signal(signal.SIGINT)
            time.sleep(0.3)
        assert process.end(30) == 0, process.output
        stream.join(20)
        assert '"finish_reason":"length"' not in stream.text


def test_engine_that_cannot_start_is_explained(launch):
    process = launch({"fault": "no such device"})
    assert process.end() == ExitStatus.ENGINE_NOT_STARTED
    assert "Traceback" not in process.output
    assert "failed: " in process.output
    assert "asked to fail: no such device" in process.output


def test_engine_that_dies_ends_the_server_with_its_cause(launch):
    process = launch(max_restarts=0)
    url = process.url()
    (child,) = psutil.Process(process.popen.pid).children()
    child.kill()
    assert process.end(30) == ExitStatus.ENGINE_DEAD
    assert "failed: " in process.output
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/health")


def test_port_in_use(launch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-m", "quire_server.cli", "serve", "--port", str(taken.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == ExitStatus.CANNOT_LISTEN
    assert "cannot listen on 127.0.0.1" in done.stderr
    assert "--port" in done.stderr


def test_two_servers_that_start_at_the_same_time(launch, tiny_folder):
    # Neither listens while its engine loads, so both may bind.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = [launch(server={"port": port}) for _ in range(2)]
    for process in both:
        process.wait_for("OpenAI API:|failed: ")
    winner, loser = sorted(both, key=lambda process: "failed: " in process.output)
    assert f"failed: cannot listen on 127.0.0.1:{port}" in loser.output
    assert loser.end() == ExitStatus.CANNOT_LISTEN
    assert "Traceback" not in loser.output
    assert httpx.get(f"{winner.url()}/health").status_code == 200


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ({"response_store": "/dev/null/responses.sqlite"}, "cannot keep responses in '/dev/null/responses.sqlite'"),
        ({"response_store": "no_such_module:store"}, "there is no response store 'no_such_module:store'"),
        ({"chat_template": "{{ messages"}, "the chat template does not compile: line 1"),
        ({"default_chat_template_kwargs": {"messages": []}}, "default_chat_template_kwargs.messages is reserved"),
    ],
)
def test_what_every_request_would_fail_on_fails_at_the_start(launch, server, words):
    process = launch(server=server)
    process.wait_for("OpenAI API:|failed: ")
    assert "OpenAI API:" not in process.output
    assert process.end() == ExitStatus.WRONG_SETTING
    assert f"failed: {words}" in process.output
    assert "Traceback" not in process.output


def test_wrong_model_path(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for model, words in ((tmp_path / "none", "none"), (tmp_path, "config.json")):
        command = [sys.executable, "-m", "quire_server.cli", "serve", str(model), "--port", "0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 1, done.stdout + done.stderr
        assert words in done.stderr
        assert "Traceback" not in done.stderr


def test_banner_says_what_was_chosen(launch):
    process = launch(server={"api_key": ("secret",)})
    process.url()
    for words in ("chat page:", "blocks of 16 tokens", "executor:", "API key required", "ready after:"):
        process.wait_for(words)
    assert "secret" not in process.output
