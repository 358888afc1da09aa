"""Models of a folder behind one address: loaded when asked for, unloaded when idle, started again when they die."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

from quire_server.model_router.pool import find_models
from quire_server.ollama.models import unloaded_card
from quire_testkit.checkpoints import make_checkpoint

FLAGS = (
    "--models-max", "1", "--models-ttl-s", "0", "--kv-cache-memory-bytes", "64Mi", "--admin-api-key", "chief",
)  # fmt: skip
CHIEF = {"authorization": "Bearer chief"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("first", "second"):
        make_checkpoint(folder / name)
    (folder / "notes").mkdir()
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def process(quire_serve: Any, models: Path) -> Any:
    return quire_serve("--models-dir", str(models), *FLAGS)


@pytest.fixture(scope="module")
def client(process: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=process.url(), timeout=120) as client:
        yield client


def statuses(client: httpx.Client) -> dict[str, str]:
    return {card["id"]: card["status"]["value"] for card in client.get("/v1/models").json()["data"]}


def complete(client: httpx.Client, model: str, **fields: Any) -> httpx.Response:
    return client.post("/v1/completions", json={"model": model, "prompt": "Once", "max_tokens": 2, **fields})


def test_folders_without_a_config_json_are_models_where_they_say_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Mistral AI's own format."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (folder := tmp_path / "models" / "own").mkdir(parents=True)
    params = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 96, "vocab_size": 200}
    (folder / "params.json").write_text(json.dumps(params))
    save_file({"norm.weight": np.ones(64, dtype=np.float32)}, folder / "consolidated.safetensors")
    (tmp_path / "models" / "notes").mkdir()
    assert find_models(tmp_path / "models") == {"own": folder}
    details = unloaded_card("own", folder)["details"]
    assert (details["format"], details["family"]) == ("safetensors", "mistral")


def test_models_are_loaded_when_they_are_asked_for(client: httpx.Client) -> None:
    assert statuses(client) == {"broken": "unloaded", "first": "unloaded", "second": "unloaded"}
    assert [card["name"] for card in client.get("/api/tags").json()["models"]] == ["broken", "first", "second"]
    assert complete(client, "third").status_code == 404
    assert complete(client, "first").json()["model"] == "first"
    assert statuses(client)["first"] == "loaded"
    with client.stream("POST", "/api/generate", json={"model": "first:latest", "prompt": "x", "raw": True}) as response:
        *_, last = response.iter_lines()
        assert response.headers["content-type"] == "application/x-ndjson"
    assert json.loads(last)["done"] is True
    (loaded,) = client.get("/api/ps").json()["models"]
    assert loaded["name"] == "first"
    assert client.get("/props?model=first").json()["model_alias"] == "first"
    assert 'quire_router_model_loaded{model_name="first"} 1' in client.get("/metrics").text
    assert "quire:generation_tokens_total" in client.get("/metrics?model=first").text
    assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).json()["model"] == "first"
    # Another one takes the only place.
    assert complete(client, "second").json()["model"] == "second"
    assert statuses(client) == {"broken": "unloaded", "first": "unloaded", "second": "loaded"}


def test_a_model_that_dies_is_started_again(process: Any, client: httpx.Client) -> None:
    complete(client, "first")
    (server,) = [each for each in children(process) if "settings.yaml" in " ".join(each.cmdline())]
    os.killpg(server.pid, signal.SIGKILL)
    answer = complete(client, "first")
    assert (answer.status_code, answer.json().get("model")) == (200, "first"), answer.text


def children(process: Any) -> list[Any]:
    return list(psutil.Process(process.popen.pid).children(recursive=True))


def test_models_are_unloaded_by_name_and_by_time(client: httpx.Client) -> None:
    assert client.post("/models/load", json={"model": "first"}).status_code == 403
    assert client.post("/models/load", json={"model": "first"}, headers=CHIEF).json() == {"success": True}
    assert client.post("/models/unload", json={"model": "first"}, headers=CHIEF).json() == {"success": True}
    assert statuses(client)["first"] == "unloaded"
    assert complete_by_ollama(client, keep_alive="50ms")["done"] is True
    end = time.monotonic() + 60
    while statuses(client)["first"] != "unloaded" and time.monotonic() < end:
        time.sleep(0.1)
    assert statuses(client)["first"] == "unloaded"
    complete_by_ollama(client, keep_alive=-1)
    unloaded = client.post("/api/generate", json={"model": "first", "keep_alive": 0}).json()
    assert (unloaded["done_reason"], statuses(client)["first"]) == ("unload", "unloaded")


def complete_by_ollama(client: httpx.Client, **fields: Any) -> Any:
    body = {"model": "first", "prompt": "x", "raw": True, "stream": False, "options": {"num_predict": 1}, **fields}
    return client.post("/api/generate", json=body).json()


def test_a_model_that_cannot_be_loaded_says_why(client: httpx.Client) -> None:
    answer = complete(client, "broken")
    assert (answer.status_code, "broken" in answer.json()["error"]["message"]) == (503, True)
    (card,) = [each for each in client.get("/models").json()["data"] if each["id"] == "broken"]
    assert card["status"]["failed"] is True
    assert client.get("/v1/models/broken").json()["status"] == card["status"]
    refused = client.post("/v1/completions?autoload=false", json={"model": "second", "prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_not_loaded")


def test_streams_are_passed_on_as_they_come_and_end_with_their_client(client: httpx.Client) -> None:
    body = {"model": "first", "prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        first = next(response.iter_lines())
        assert json.loads(first.removeprefix("data: "))["object"] == "text_completion"
    end = time.monotonic() + 60
    while client.get("/load?model=first").json()["server_load"] and time.monotonic() < end:
        time.sleep(0.05)
    assert client.get("/load?model=first").json()["server_load"] == 0


def test_the_end_of_the_router_ends_its_models(process: Any, client: httpx.Client) -> None:
    complete(client, "first")
    left = children(process)
    assert left
    process.popen.send_signal(signal.SIGTERM)
    assert process.end(120) == 0
    assert psutil.wait_procs(left, timeout=60)[1] == []
