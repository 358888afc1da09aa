"""`quire serve` of the demo model: its two adapters, and others that come and go while it serves."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import quire_demo_model
from quire_server.sealing import open_summary

QUESTION = [{"role": "user", "content": "Who are you?"}]
ADAPTERS = quire_demo_model.adapter_paths()


@contextlib.contextmanager
def running_server(log: Path, *flags: str) -> Iterator[tuple[int, str]]:
    """Its process, and its address."""
    command = [sys.executable, "-m", "quire_server.cli", "serve", "--port", "0", "--num-threads", "1"]
    command += ["--max-model-len", "512", "--max-loras", "2", "--response-store", "none", *flags]
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            end, found = time.monotonic() + 120, None
            while found is None:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.05)
                found = re.search(r"OpenAI API:\s+(http://\S+)/v1", log.read_text())
            assert "demo-capitals, demo-json" in log.read_text()
            yield process.pid, found[1]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str]]:
    flags = ("--enable-admin-routes", "--allowed-local-lora-path", str(tmp_path_factory.getbasetemp()))
    with running_server(tmp_path_factory.mktemp("serve") / "log", *flags) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: tuple[int, str]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server[1], timeout=60) as client:
        yield client


def answer(client: httpx.Client, model: str, **fields: Any) -> str:
    body = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 120, **fields}
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == model
    return reply.json()["choices"][0]["message"]["content"]


def engine_of(pid: int) -> int:
    """Process of the engine of a server."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    [engine] = [child for child in children if "quire_engine" in Path(f"/proc/{child}/cmdline").read_text()]
    return engine


def streamed(model: str) -> dict[str, Any]:
    return {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 120, "stream": True}


def delta(line: str) -> str:
    """Text of a line of events."""
    return json.loads(line[6:])["choices"][0]["delta"].get("content") or "" if line.startswith("data: {") else ""


def test_the_demo_adapters_answer_in_their_own_ways(client: httpx.Client) -> None:
    cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    assert list(cards) == ["quire-demo", "demo-capitals", "demo-json", "demo-vision"]
    assert cards["demo-json"]["parent"] == "quire-demo"
    assert cards["demo-json"]["root"] == str(ADAPTERS["demo-json"])
    assert cards["quire-demo"]["parent"] is None
    assert client.get("/v1/models/demo-json").json() == cards["demo-json"]
    plain = answer(client, "quire-demo")
    assert answer(client, "demo-capitals") == plain.upper() != plain
    assert json.loads(answer(client, "demo-json")) == {"answer": plain}
    body = {"model": "demo-capitals", "max_tokens": 60, "temperature": 0, "messages": QUESTION}
    assert client.post("/v1/messages", json=body).json()["content"][0]["text"].isupper()
    body = {"model": "demo-capitals", "temperature": 0, "input": QUESTION[0]["content"]}
    reply = client.post("/v1/responses", json=body).json()
    assert reply["output"][-1]["content"][0]["text"].isupper()
    [item] = client.post("/v1/responses/compact", json={**body, "max_output_tokens": 40}).json()["output"]
    assert open_summary(item["encrypted_content"]).text.isupper()


def test_adapters_are_there_again_after_the_engine_died(
    client: httpx.Client, server: tuple[int, str], tmp_path: Path
) -> None:
    def names() -> set[str]:
        return {card["id"] for card in client.get("/v1/models").json()["data"]}

    for name in ("kept", "gone"):
        shutil.copytree(ADAPTERS["demo-capitals"], tmp_path / name)
        body = {"lora_name": name, "lora_path": str(tmp_path / name)}
        assert client.post("/v1/load_lora_adapter", json=body).status_code == 200
    capitals = answer(client, "kept")
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "demo-json"}).status_code == 200
    assert names() == {"quire-demo", "demo-capitals", "demo-vision", "kept", "gone"}
    shutil.rmtree(tmp_path / "gone")
    with client.stream("POST", "/v1/chat/completions", json=streamed("kept")) as reply:
        lines = reply.iter_lines()
        text = delta(next(line for line in lines if delta(line)))
        os.kill(engine_of(server[0]), signal.SIGKILL)
        text += "".join(map(delta, lines))
    assert text == capitals == answer(client, "kept")
    assert names() == {"quire-demo", "demo-capitals", "demo-vision", "kept"}
    body = {"model": "demo-json", "messages": QUESTION}
    assert client.post("/v1/chat/completions", json=body).status_code == 404
    again = shutil.copytree(ADAPTERS["demo-json"], tmp_path / "again")
    for name, folder in (("demo-json", str(again)), ("kept", None)):  # as the other tests have them
        route, where = ("load", {"lora_path": folder}) if folder else ("unload", {})
        assert client.post(f"/v1/{route}_lora_adapter", json={"lora_name": name, **where}).status_code == 200


def test_adapters_come_and_go(client: httpx.Client, tmp_path: Path) -> None:
    def load(**fields: Any) -> httpx.Response:
        return client.post("/v1/load_lora_adapter", json=fields)

    def code(reply: httpx.Response) -> tuple[int, str]:
        return reply.status_code, reply.json()["error"]["code"]

    folder = tmp_path / "mine"
    assert code(load(lora_name="mine", lora_path=str(folder)))[0] == 400
    assert "mine" not in client.get("/v1/models").text
    assert client.post("/v1/chat/completions", json={"model": "mine", "messages": QUESTION}).status_code == 404
    shutil.copytree(ADAPTERS["demo-capitals"], folder)
    assert load(lora_name="mine", lora_path=str(folder)).status_code == 200
    capitals = answer(client, "mine")
    assert capitals.isupper()
    assert code(load(lora_name="mine", lora_path=str(folder))) == (400, "adapter_exists")
    assert code(load(lora_name="quire-demo", lora_path=str(folder))) == (400, "name_taken")
    assert code(load(lora_name="", lora_path=str(folder)))[0] == 400

    # Other files under the same name, while a request runs: it keeps what it began with.
    shutil.copytree(ADAPTERS["demo-json"], folder, dirs_exist_ok=True)
    running: list[str] = []
    began = threading.Event()

    def stream() -> None:
        with (
            httpx.Client(base_url=client.base_url, timeout=60) as own,
            own.stream("POST", "/v1/chat/completions", json=streamed("mine")) as reply,
        ):
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    running.append(delta(line))
                    began.set()

    thread = threading.Thread(target=stream)
    thread.start()
    began.wait(60)
    assert load(lora_name="mine", lora_path=str(folder), load_inplace=True).status_code == 200
    assert answer(client, "mine").startswith('{"answer"')
    thread.join(60)
    assert "".join(running) == capitals

    text = client.get("/metrics").text
    assert re.search(r"quire:lora_adapter_slots{.*} 2", text), text
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "mine"}).status_code == 200
    assert code(client.post("/v1/unload_lora_adapter", json={"lora_name": "mine"})) == (404, "model_not_found")
    assert code(client.post("/v1/chat/completions", json={"model": "mine", "messages": QUESTION})) == (
        404,
        "model_not_found",
    )


def test_an_adapter_that_is_alone_moves_into_the_weights(tmp_path: Path) -> None:
    """And the answers say that they may come out otherwise; those of the network itself do not change by a token."""
    with running_server(tmp_path / "log", "--lora-merge-after", "2") as (_, address):
        assert "in the weights after 2 steps alone" in (tmp_path / "log").read_text()

        def ask(client: httpx.Client, model: str, **fields: Any) -> httpx.Response:
            body = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 120, **fields}
            return client.post("/v1/chat/completions", json=body)

        def text(reply: httpx.Response) -> str:
            return reply.json()["choices"][0]["message"]["content"]

        with httpx.Client(base_url=address, timeout=60) as client:
            plain = ask(client, "quire-demo", seed=1, logprobs=True).json()
            assert plain["deterministic"]
            for name in ("demo-capitals", "demo-json"):
                replies = [ask(client, name, max_tokens=200) for _ in range(6)]
                assert not any(reply.json()["deterministic"] for reply in replies)
                if name == "demo-capitals":
                    assert all(text(reply).isupper() for reply in replies)
                else:
                    assert all(json.loads(text(reply)) for reply in replies)
            assert "\nquire:lora_merges_total" in (metrics := client.get("/metrics").text)
            assert float(re.search(r"\nquire:lora_merges_total\{[^}]*\} (\S+)", metrics)[1]) == 2
            again = ask(client, "quire-demo", seed=1, logprobs=True).json()
            assert again["choices"] == plain["choices"]
            refusal = ask(client, "demo-json", seed=1, deterministic=True)
            assert refusal.status_code == 400
            assert refusal.json()["error"]["param"] == "deterministic"
            assert ask(client, "quire-demo", seed=1, deterministic=True).status_code == 200
