"""The log of a server from its start to its end: the access log, throughput, JSON, and nothing that is secret."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire_interfaces import ConfigError
from quire_server.config import ServerConfig
from quire_server.log_settings import begin_logging

CHAT = {"messages": [{"role": "user", "content": "a private question"}], "max_tokens": 5, "ignore_eos": True}


def end(process: Any) -> str:
    process.popen.send_signal(signal.SIGTERM)
    assert process.end(30) == 0, process.output
    return str(process.output)


def test_access_log(launch: Any, tmp_path: Path) -> None:
    handler = {"class": "logging.FileHandler", "filename": str(tmp_path / "access.log"), "formatter": "short"}
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"short": {"format": "%(status)s %(path)s"}},
        "handlers": {"file": handler},
        "loggers": {"quire_server.access": {"handlers": ["file"]}},
    }
    (tmp_path / "log.json").write_text(json.dumps(config))
    process = launch(
        server={
            "access_log": True,
            "api_key": ["secret-key"],
            "disable_access_log_for_endpoints": ["/v1/models", "/version"],
            "log_config_file": str(tmp_path / "log.json"),
        }
    )
    key = {"authorization": "Bearer secret-key"}
    with httpx.Client(base_url=process.url(), headers=key) as client:
        url = "/v1/chat/completions"
        told = client.post(url, json={**CHAT, "n": 2}, headers={"x-request-id": "mine"}).json()["usage"]
        client.post(url, json={**CHAT, "stream": True}, headers={"x-request-id": "streamed"})
        client.post(url, json={**CHAT, "max_tokens": -1}, headers={"x-request-id": "wrong"})
        client.get("/%0aforged%20line?key=secret-key", headers={"x-request-id": "unknown"})
        for path in ("/health", "/ready", "/metrics"):
            assert client.get(path).status_code == 200
        assert client.get("/v1/models", headers={"x-request-id": "silent"}).status_code == 200
    assert httpx.get(process.url() + "/?key=secret-key", headers={"x-request-id": "page"}).status_code == 200
    assert httpx.get(process.url() + "/metrics", headers={"x-request-id": "refused"}).status_code == 401
    output = end(process)
    lines = {found[2]: found[1] for found in re.finditer(r"quire_server\.access: (.*) \(request (\S+)\)\n", output)}
    assert sorted(lines) == ["mine", "page", "refused", "streamed", "unknown", "wrong"]  # a stream ends when it ends
    time_ms = r"\d+\.\d ms"
    prompt = told["prompt_tokens"]
    for name, pattern in {
        "mine": f"127.0.0.1 POST {url} 200 {time_ms}, {prompt} prompt tokens, 10 generation tokens",
        "streamed": f"127.0.0.1 POST {url} 200 {time_ms}, {prompt} prompt tokens, 5 generation tokens",
        "wrong": f"127.0.0.1 POST {url} 400 {time_ms}",
        "unknown": f"127.0.0.1 GET /%0Aforged%20line 404 {time_ms}",
        "page": f"127.0.0.1 GET / 200 {time_ms}",
        "refused": f"127.0.0.1 GET /metrics 401 {time_ms}",
    }.items():
        assert re.fullmatch(pattern, lines[name]), lines[name]
    written = (tmp_path / "access.log").read_text().splitlines()
    assert sorted(written) == sorted(
        [f"200 {url}"] * 2 + [f"400 {url}", "404 /%0aforged%20line".replace("0a", "0A"), "200 /", "401 /metrics"]
    )
    assert told["completion_tokens"] == 10
    assert "secret" not in output
    assert "private" not in output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("[]", "it is no JSON object"),
        ("{", "must hold a JSON object"),
        ('{"version": 2}', "Unsupported version"),
        ('{"version": 1, "handlers": {"file": {"class": "logging.Nothing"}}}', "file"),
    ],
)
def test_a_file_of_the_log_that_cannot_be_used(text: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        begin_logging(ServerConfig(log_config_file=str(path)))
    assert caught.value.field == "log_config_file"


def test_no_access_log_by_default_and_a_log_that_says_what_happened(launch: Any) -> None:
    process = launch({"step_time_s": 0.02}, server={"log_stats_interval_s": 0.3})
    url = process.url()
    time.sleep(1.0)
    assert "tokens/s" not in process.output, "idle"
    httpx.post(f"{url}/v1/chat/completions", json={**CHAT, "max_tokens": 60}, timeout=30)
    time.sleep(1.0)
    output = end(process)
    assert "quire_server.access" not in output
    begin, *rest = [line for line in output.splitlines() if re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line)]
    assert re.search(r" INFO \[server\] quire_server\.serve: Quire \S+ loads /", begin)
    *stats, stopping, totals = rest
    for line in stats:
        assert re.search(
            r"quire\.stats: prompt: \d+\.\d tokens/s, generation: \d+\.\d tokens/s, running: [01] req", line
        )
    assert 2 <= len(stats) <= 12
    assert "stopping: 0 requests are being answered" in stopping
    assert re.search(r"quire\.stats: served for \d+ s: 1 requests, \d+ prompt tokens, 60 generation tokens$", totals)


def test_figures_may_be_left_out(launch: Any) -> None:
    process = launch(server={"disable_log_stats": True, "log_stats_interval_s": 0.1})
    httpx.post(f"{process.url()}/v1/chat/completions", json=CHAT, timeout=30)
    time.sleep(0.5)
    assert "quire.stats" not in end(process)


def test_json(launch: Any) -> None:
    process = launch(server={"log_format": "json", "access_log": True})
    url = process.wait_for(r'"address": "(http://[^"]+)"')[1]
    httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 3}, headers={"x-request-id": "r"})
    output = end(process)
    records = [json.loads(line) for line in output.splitlines() if not line.startswith("heavy modules")]
    assert all({"time", "level", "process", "logger", "message"} <= set(record) for record in records)
    (access,) = [record for record in records if record["logger"] == "quire_server.access"]
    assert (access["request_id"], access["status"], access["method"]) == ("r", 200, "POST")
    assert (access["path"], access["generation_tokens"]) == ("/v1/completions", 3)
    assert access["duration_ms"] > 0
    assert records[-1]["requests"] == 1


def test_errors_at_the_start_are_json_too(quire_serve: Any) -> None:
    process = quire_serve("--log-format", "json", "--max-model-len", "999999")
    assert process.end(120) == 2
    last = json.loads(process.output.splitlines()[-1])
    assert last["level"] == "critical"
    assert "max_model_len" in last["message"]


def test_the_level_of_the_log(launch: Any) -> None:
    process = launch(server={"log_level": "error", "access_log": True})
    httpx.get(f"{process.url()}/version")
    output = end(process)
    assert " INFO " not in output
    assert "OpenAI API:" in output, "the banner is no log"


def test_an_engine_that_dies_is_in_the_log(launch: Any) -> None:
    import os

    import psutil

    process = launch(max_restarts=1)
    process.url()
    for words in ("the engine is started again (1 of max_restarts=1", "the engine is gone for good"):
        (engine,) = psutil.Process(process.popen.pid).children()
        os.kill(engine.pid, signal.SIGKILL)
        process.wait_for(re.escape(words))
        if "again" in words:
            while httpx.get(f"{process.url()}/ready").status_code != 200:
                time.sleep(0.05)
    assert process.end(30) == 5
    assert len(re.findall(r"ERROR \[server\] quire_engine\.\S+: the engine", process.output)) == 2
    assert "Traceback" not in process.output
