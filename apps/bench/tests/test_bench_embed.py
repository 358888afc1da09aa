"""`quire bench peers --task embed`: engines that embed."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import pytest

from quire_bench.embed_situations import mixed_lengths, parse_embed_situations
from quire_bench.limits import MachineLimits, ModelWork
from quire_bench.peer_process import PeerProcess, engine_settings
from quire_bench.peers import PROGRAMS, Engine, PeerOptions, find_engine
from quire_bench.situations import Lengths
from quire_bench.workload import BenchRequest
from quire_interfaces import ConfigError, QuireError
from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.tokenizers import write_tokenizer

STAND_INS = {
    "onnxruntime": """
import json, os
import numpy
__version__ = "0.0-stand-in"
class GraphOptimizationLevel:
    ORT_ENABLE_ALL = 99
class SessionOptions:
    pass
class InferenceSession:
    def __init__(self, file, options, providers):
        self.asked = [file, options.intra_op_num_threads]
    def get_inputs(self):
        class Input:
            def __init__(self, name): self.name = name
        return [Input(name) for name in ("input_ids", "attention_mask", "token_type_ids")]
    def run(self, names, inputs):
        shapes = {name: each.tolist() for name, each in inputs.items()}
        print(json.dumps([self.asked, shapes]), file=open(os.environ["STAND_IN_LOG"], "a"), flush=True)
        return [numpy.ones((*inputs["input_ids"].shape, 4), dtype=numpy.float32)]
""",
    "vllm": """
import json, os
__version__ = "0.0-stand-in"
class LLM:
    def __init__(self, **values):
        self.asked = values
    def embed(self, inputs, use_tqdm):
        print(json.dumps([self.asked["runner"], inputs]), file=open(os.environ["STAND_IN_LOG"], "a"), flush=True)
        return inputs
""",
}
REQUESTS = [BenchRequest([11, 12], 1), BenchRequest([13, 14, 15], 1)]


def test_beside_transformers(tmp_path: Path, quire: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    model, file = tmp_path / "model", tmp_path / "figures.json"
    case = ENCODER_CASES["BertModel"]
    write_checkpoint(model, "BertModel", replace(case, fields={**case.fields, "vocab_size": 300}))
    write_tokenizer(model, vocab_size=300)
    (model / "sentence_bert_config.json").write_text('{"max_seq_length": 8}')  # of texts, not of the network
    asked = ("--task", "embed", "--situations", "embed-40,embed-mixed,latency-16,memory", "--peers", "transformers")
    shape = ("--repeats", 1, "--num-threads", 1, "--token-range", "10:99", "--json", file)
    assert quire("bench", "peers", model, *asked, *shape) == 0
    figures = json.loads(file.read_text())
    for name in ("embed-40", "embed-mixed", "latency-16", "memory"):
        ours, theirs = (figures["situations"][name][engine] for engine in ("quire", "transformers"))
        assert ours["rounds"][0] > 0
        assert theirs["rounds"][0] > 0
        assert ours["limit"] is None
    out = capsys.readouterr().out
    assert "204 texts of 40 tokens at once, texts/s" in out
    assert "one text of 16 tokens, s (less is better)" in out


@pytest.mark.parametrize("name", STAND_INS)
def test_other_engines_get_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / f"{name}.py").write_text(STAND_INS[name])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "log"))
    engine = Engine(name=name, command=(sys.executable, str(PROGRAMS / f"run_{name}_embed.py")), file="model.onnx")
    settings = engine_settings(Path("/models/x"), dtype="float32", num_threads=2, max_model_len=64, max_num_seqs=1)
    with PeerProcess(engine, settings, timeout_s=60) as peer:
        assert peer.run(REQUESTS) > 0
    _, (asked, inputs) = (json.loads(line) for line in (tmp_path / "log").read_text().splitlines())
    if name == "vllm":
        assert asked == "pooling"
        assert inputs == [{"prompt_token_ids": request.prompt_token_ids} for request in REQUESTS]
        return
    assert asked == ["model.onnx", 2]
    assert inputs["input_ids"] == [[13, 14, 15], [11, 12, 0]]  # the longest first, padded
    assert inputs["attention_mask"] == [[1, 1, 1], [1, 1, 0]]
    assert inputs["token_type_ids"] == [[0, 0, 0], [0, 0, 0]]


def test_figures_are_of_texts_that_differ_from_run_to_run() -> None:
    many, one = parse_embed_situations("embed-512,latency-20", Lengths(), 512)
    batches: list[Any] = []

    def run(batch: Any) -> float:
        batches.append(batch)
        return 2.0

    assert many.measure(run, 0) == 8.0  # 16 texts in two seconds
    assert [len(batch) for batch in batches] == [16, 16]
    assert batches[0] != batches[1]
    assert all(len(each.prompt_token_ids) == 512 for each in batches[1])
    batches.clear()
    assert one.measure(run, 0) == 2.0
    assert {len(batch) for batch in batches} == {1}
    assert len({tuple(batch[0].prompt_token_ids) for batch in batches}) == len(batches) == 17
    machine = MachineLimits(read_bytes_per_s=1e9, matmul_flop_per_s=1e9)
    work = ModelWork(weight_bytes=1, layer_parameters=1, head_parameters=1, kv_bytes_per_token=1, attention_flop=1)
    assert many.limit(machine, work) is None
    assert many.max_model_len == 512


def test_mixed_lengths_are_log_normal() -> None:
    lens = mixed_lengths(2000, 512)
    assert lens == mixed_lengths(2000, 512)
    assert 90 < median(lens) < 110
    assert min(lens) >= 4
    assert max(lens) == 512
    assert 0.1 < sum(length < 50 for length in lens) / 2000 < 0.3


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="among first-token, embed-N, embed-mixed, latency-N, memory, got 'decode'"):
        parse_embed_situations("embed-16,decode", Lengths(), 512)
    assert find_engine("llama.cpp", PeerOptions(), "embed") == "has no program for embeddings here"
    assert find_engine("sentence-transformers", PeerOptions()) == "has no program for text here"
    ours = find_engine("quire", PeerOptions(), "embed")
    assert isinstance(ours, Engine)
    assert ours.command[1].endswith("run_quire_embed.py")


class Embeddings(BaseHTTPRequestHandler):
    """Answers `/v1/embeddings` for texts below 50 tokens, one embedding each."""

    protocol_version = "HTTP/1.1"
    bodies: ClassVar[list[dict[str, Any]]] = []

    def _answer(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "some-encoder"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        if max(map(len, body["input"])) >= 50:
            self._answer(400, {"error": "too long"})
        else:
            self._answer(200, {"data": [{"embedding": ""} for _ in body["input"]]})

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Embeddings) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join()
        Embeddings.bodies.clear()


def test_a_server_is_measured(server: str, quire: Callable[..., int], tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    counts = ("--num-prompts", 10, "--input-len", 20, "--batch-size", 4, "--repeats", 2, "--num-latencies", 3)
    assert quire("bench", "embed", "--base-url", server, *counts, "--output-json", file) == 0
    sizes = sorted(len(body["input"]) for body in Embeddings.bodies)
    assert sizes == [1, 1, 1, 2, 2, 2, 4, 4, 4, 4, 4, 4]
    assert {body["model"] for body in Embeddings.bodies} == {"some-encoder"}
    assert {len(text) for body in Embeddings.bodies for text in body["input"]} == {20}
    figures = json.loads(file.read_text())
    assert figures["num_texts"] == 10
    assert figures["input_tokens"] == 200
    assert figures["input_tokens_per_s"] == pytest.approx(20 * figures["texts_per_s"])
    assert len(figures["rates_texts_per_s"]) == 2
    with pytest.raises(QuireError, match="HTTP 400"):
        quire("bench", "embed", "--base-url", server, "--input-len", 50)
    with pytest.raises(ConfigError, match="repeats must be at least 1, got 0"):
        quire("bench", "embed", "--base-url", server, "--repeats", 0)


def test_a_server_that_is_not_there(free_port: int, quire: Callable[..., int]) -> None:
    with pytest.raises(QuireError, match="/v1/models failed: ConnectionRefusedError"):
        quire("bench", "embed", "--base-url", f"http://127.0.0.1:{free_port}")


def test_this_process_is_measured(tmp_path: Path, quire: Callable[..., int]) -> None:
    model, file = tmp_path / "model", tmp_path / "figures.json"
    case = ENCODER_CASES["BertModel"]
    write_checkpoint(model, "BertModel", replace(case, fields={**case.fields, "vocab_size": 300}))
    write_tokenizer(model, vocab_size=300)
    (model / "sentence_bert_config.json").write_text('{"max_seq_length": 8}')  # of texts, not of the network
    counts = ("--num-prompts", 5, "--input-len", 20, "--length-spread", 0.5, "--num-latencies", 2)
    assert quire("bench", "embed", model, *counts, "--output-json", file) == 0
    figures = json.loads(file.read_text())
    assert figures["texts_per_s"] > 0
    assert figures["latency_s"]["p50"] > 0
