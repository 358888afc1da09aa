"""deploy/ray_serve.py on a real local Ray cluster: a chat completion, a stream, and an error come through."""

from __future__ import annotations

import json
import os
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed: deploy/ray_serve.py was NOT run (extra `ray`)")
serve = pytest.importorskip("ray.serve", reason="Ray Serve is not installed: deploy/ray_serve.py was NOT run")

DEPLOY = Path(__file__).parents[1] / "deploy"
SETTINGS = {"num_threads": 1, "max_model_len": 256, "num_gpu_blocks_override": 128, "response_store": "none"}


def start_cluster(path: str) -> None:
    """Ray waits 30 s for its own processes, which a busy machine may need."""
    for attempt in range(3):
        try:
            ray.init(
                num_cpus=2,
                include_dashboard=False,
                log_to_driver=False,
                runtime_env={"env_vars": {"PYTHONPATH": path}},
            )
            return
        except Exception:
            ray.shutdown()
            if attempt == 2:
                raise


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join([str(DEPLOY), *sys.path])
    start_cluster(path)
    try:
        sys.path.insert(0, str(DEPLOY))
        import ray_serve

        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(ray_serve.build(SETTINGS))
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
        sys.path.remove(str(DEPLOY))


def post(url: str, **fields: Any) -> urllib.request.Request:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0, **fields}
    headers = {"Content-Type": "application/json"}
    return urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)


def test_a_chat_completion_is_answered_whole_and_as_a_stream(url: str) -> None:
    with urllib.request.urlopen(post(url), timeout=120) as response:
        answer = json.load(response)
    text = answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] > 0
    assert text
    with urllib.request.urlopen(post(url, stream=True), timeout=120) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix(b"data: ").strip() for line in response if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    deltas = [choice["delta"] for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == text


def test_errors_and_figures_come_through(url: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(post(url, temperature=-1), timeout=120)
    assert caught.value.code == 400
    assert json.load(caught.value)["error"]["param"] == "temperature"
    with urllib.request.urlopen(f"{url}/metrics", timeout=120) as response:
        assert b"quire:request_success_total" in response.read()
