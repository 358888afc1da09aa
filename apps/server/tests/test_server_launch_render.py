"""`quire launch render`: what a server with an engine would render, no other routes, and no torch."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quire import QuireConfig
from quire_observability import EngineMetrics
from quire_server import cli
from quire_server.app import make_app
from quire_server.config import ServerConfig
from quire_server.context import ServerContext
from quire_server.render_client import RENDER_PATHS, render_llm

PROGRAM = """
import os, signal, sys, threading, urllib.request
from quire_server import cli, render_only
def announce(*arguments, **options):
    signal.raise_signal(signal.SIGTERM)
render_only.print = announce  # once it answers
status = cli.main(["launch", "render", sys.argv[1], "--port", "0", "--response-store", "none"])
print(status, sorted({name.split(".")[0] for name in sys.modules} & {"torch", "transformers", "numpy"}))
"""
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "¤Hello there.¥"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CHAT = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "stop": ["zz"], "tools": [TOOL], "seed": 1}


class Rendering:
    """The app of such a server, without a socket."""

    def __init__(self, folder: Any, **settings: Any) -> None:
        self._loop = asyncio.new_event_loop()
        llm = render_llm(
            QuireConfig.of(model=str(folder), tool_call_parser="hermes", reasoning_parser="qwen3", **settings)
        )
        self._loop.run_until_complete(llm.ready())
        config = ServerConfig(served_model_name=("tiny",), response_store="none", enable_tokenizer_info_endpoint=True)
        context = ServerContext(llm=llm, config=config, metrics=EngineMetrics(), model_names=("tiny",))
        transport = httpx.ASGITransport(make_app(context))
        self._client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")

    def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        return self._loop.run_until_complete(self._client.request(method, path, json=body))

    def close(self) -> None:
        self._loop.run_until_complete(self._client.aclose())
        self._loop.close()


@pytest.fixture(scope="module")
def rendering(tiny_folder: Any) -> Iterator[Rendering]:
    app = Rendering(tiny_folder, max_model_len=2048)
    yield app
    app.close()


def fresh(value: Any) -> Any:
    """Without ids, which are new each time."""
    if isinstance(value, list):
        return [fresh(each) for each in value]
    return {key: each for key, each in value.items() if key not in ("request_id", "id", "created")}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions/render", CHAT),
        ("/v1/completions/render", {"model": "tiny", "prompt": ["one", "two"], "max_tokens": 3}),
        ("/v1/messages/render", {"model": "tiny", "messages": MESSAGES[1:], "max_tokens": 5}),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": MESSAGES[1:]}),
        ("/tokenize", {"model": "tiny", "messages": MESSAGES}),
        ("/tokenize", {"model": "tiny", "prompt": "Hello", "return_token_strs": True}),
        ("/detokenize", {"model": "tiny", "tokens": [40, 50, 60]}),
        ("/v1/chat/completions/render", {**CHAT, "max_tokens": -1}),
        ("/v1/chat/completions/render", {**CHAT, "messages": [{"role": "user", "content": "word " * 5000}]}),
        ("/v1/chat/completions/render", {**CHAT, "model": "none"}),
        ("/detokenize", {"model": "tiny", "tokens": [10**6]}),
    ],
)
def test_it_answers_as_a_server_with_an_engine(rendering: Rendering, scripted: Any, path: str, body: Any) -> None:
    expected, got = scripted.post(path, body), rendering.ask("POST", path, body)
    assert got.status_code == expected.status_code
    assert fresh(got.json()) == fresh(expected.json())


def test_an_engine_generates_what_was_rendered_and_the_answer_is_made_here(rendering: Rendering, scripted: Any) -> None:
    rendered = rendering.ask("POST", "/v1/chat/completions/render", {**CHAT, "max_tokens": 50}).json()
    generated = scripted.post("/inference/v1/generate", rendered).json()
    body = {"model": "tiny", "chat_request": CHAT, "generate_response": generated}
    answer = rendering.ask("POST", "/v1/chat/completions/derender", body).json()
    assert answer["choices"][0]["message"]["content"] == "Hello there."
    assert answer["usage"]["prompt_tokens"] == len(rendered["token_ids"])


def test_it_has_no_other_routes(rendering: Rendering) -> None:
    document = rendering.ask("GET", "/openapi.json").json()
    listed = {path.replace("{name}", "{name:path}") for path in document["paths"]}
    assert listed == RENDER_PATHS
    for path in ("/v1/chat/completions", "/v1/responses", "/inference/v1/generate", "/api/chat", "/v1/embeddings"):
        refused = rendering.ask("POST", path, CHAT)
        assert refused.status_code == 404
        assert "renders and tokenizes only" in refused.text
    constrained = {**CHAT, "response_format": {"type": "json_object"}}
    rendered = rendering.ask("POST", "/v1/chat/completions/render", constrained).json()
    assert rendered["sampling_params"]["structured_outputs"] is not None
    for path in ("/health", "/ready", "/v1/models", "/version", "/metrics", "/load", "/tokenizer_info"):
        assert rendering.ask("GET", path).status_code == 200
    (model,) = rendering.ask("GET", "/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", 2048)


def test_the_process_has_no_torch(tiny_folder: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tiny_folder)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "0 []\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("render", "--models-dir", "/tmp"), "does not go with --models-dir"),
        (("render", "--api-server-count", "2"), "does not go with --api-server-count"),
        (("render", "/none/here"), "no folder or GGUF file here"),
    ],
)
def test_bad_input(capsys: Any, arguments: tuple[str, ...], words: str) -> None:
    assert cli.main(["launch", *arguments]) in (1, 2)
    assert words in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        cli.main(["launch", "engine"])
    assert ended.value.code == 2
    assert "invalid choice: 'engine'" in capsys.readouterr().err
