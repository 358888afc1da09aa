"""The programs of engines that cannot be installed for a test: what they ask of stand-ins for the engine itself.

Transformers is measured for real in test_bench_peers.py; llama.cpp's and OpenVINO's bindings need a converted model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from quire_bench import BenchRequest
from quire_bench.peer_process import PeerProcess, engine_settings
from quire_bench.peers import PROGRAMS, Engine
from quire_interfaces import QuireError

REQUESTS = [BenchRequest([11, 12, 13], 5), BenchRequest([14], 3)]

VLLM = """
import json, os, sys
__version__ = "0.0-stand-in"
log = open(os.environ["STAND_IN_LOG"], "a")

class SamplingParams:
    def __init__(self, **values):
        self.values = values

class LLM:
    def __init__(self, **values):
        print("INFO: vllm is chatty")
        print(json.dumps([values, os.environ["VLLM_CPU_KVCACHE_SPACE"]]), file=log, flush=True)

    def generate(self, inputs, params, use_tqdm):
        print(json.dumps([inputs, [each.values for each in params], use_tqdm]), file=log, flush=True)
        class Of:
            def __init__(self, **values): self.__dict__.update(values)
        return [Of(outputs=[Of(token_ids=[1] * each.values["max_tokens"])]) for each in params]
"""

LLAMA_SERVER = """#!{python}
import json, os, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
log = open(os.environ["STAND_IN_LOG"], "a")
print(json.dumps(sys.argv[1:]), file=log, flush=True)
if "refuse.gguf" in sys.argv[2]:
    sys.exit("llama-server: unknown model architecture")
ready_at = time.monotonic() + 0.3
both = threading.Barrier(2)

class Handler(BaseHTTPRequestHandler):
    def answer(self, status, value):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        is_up = time.monotonic() > ready_at
        self.answer(200 if is_up else 503, {{"build_info": "b1-stand-in"}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print(json.dumps(body), file=log, flush=True)
        if body["n_predict"] > 1:
            both.wait(10)  # they come at once, or never
        self.answer(200, {{"tokens_predicted": body["n_predict"]}})

    def log_message(self, *_):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def settings(num_threads: int | None = 2) -> dict[str, Any]:
    return engine_settings(
        Path("/models/x"), dtype="bfloat16", num_threads=num_threads, max_model_len=4096, max_num_seqs=8
    )


def test_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    engine = Engine(name="vllm", command=(sys.executable, str(PROGRAMS / "run_vllm.py")))
    with PeerProcess(engine, settings(), timeout_s=60) as peer:
        assert peer.version == "0.0-stand-in"
        assert peer.run(REQUESTS) > 0
    (made, space), first, second = (json.loads(line) for line in log.read_text().splitlines())
    assert made["model"] == "/models/x"
    assert (made["dtype"], made["max_model_len"], made["max_num_seqs"]) == ("bfloat16", 4096, 8)
    assert made["enable_prefix_caching"] is False
    assert space == "4"
    assert [params["max_tokens"] for params in first[1]] == [1]
    assert [each["prompt_token_ids"] for each in second[0]] == [[11, 12, 13], [14]]
    assert [params["max_tokens"] for params in second[1]] == [5, 3]
    assert all(params["ignore_eos"] and params["temperature"] == 0 for params in second[1])


@pytest.fixture
def llama_server(tmp_path: Path) -> str:
    path = tmp_path / "llama-server"
    path.write_text(LLAMA_SERVER.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


def test_llama_server(llama_server: str, log: Path) -> None:
    command = (sys.executable, str(PROGRAMS / "run_llama_server.py"))
    engine = Engine(name="llama-server", command=command, file="/models/x.gguf", executable=llama_server)
    with PeerProcess(engine, settings(), timeout_s=60) as peer:
        assert peer.version == "b1-stand-in"
        assert peer.first_token_s > 0.3
        assert peer.run(REQUESTS) > 0
    arguments, first, *both = (json.loads(line) for line in log.read_text().splitlines())
    given = dict(zip(arguments[::2], arguments[1::2], strict=False))
    assert given["--model"] == "/models/x.gguf"
    assert (given["--threads"], given["--parallel"], given["--ctx-size"]) == ("2", "8", str(8 * 4096))
    assert (first["n_predict"], first["cache_prompt"]) == (1, False)
    assert sorted((body["prompt"], body["n_predict"]) for body in both) == [([11, 12, 13], 5), ([14], 3)]
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in both)


def test_a_llama_server_that_does_not_start(llama_server: str, log: Path) -> None:
    command = (sys.executable, str(PROGRAMS / "run_llama_server.py"))
    engine = Engine(name="llama-server", command=command, file="/models/refuse.gguf", executable=llama_server)
    with pytest.raises(QuireError, match=r"ended with status 1 while it started(?s:.*)unknown model architecture"):
        PeerProcess(engine, settings(None), timeout_s=60)
    (arguments,) = (json.loads(line) for line in log.read_text().splitlines())
    assert "--threads" not in arguments
