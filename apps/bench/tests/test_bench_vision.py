"""`quire bench peers --task vision`: engines that answer messages with an image."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire_bench.limits import MachineLimits, ModelWork
from quire_bench.peer_process import PeerProcess, engine_settings
from quire_bench.peers import PROGRAMS, Engine, PeerOptions, find_engine
from quire_bench.vision_situations import parse_image_size, parse_vision_situations
from quire_bench.workload import ImageRequest
from quire_interfaces import ConfigError
from quire_testkit.seeing_models import SeeingModel

VLLM = """
import json, os
__version__ = "0.0-stand-in"
log = open(os.environ["STAND_IN_LOG"], "a")

class SamplingParams:
    def __init__(self, **values):
        self.values = values

class LLM:
    def __init__(self, **values):
        pass

    def chat(self, conversations, params, use_tqdm):
        parts = [conversation[0]["content"] for conversation in conversations]
        sizes = [image["image_pil"].size for image, _ in parts]
        print(json.dumps([sizes, [text["text"] for _, text in parts]]), file=log, flush=True)
        class Of:
            def __init__(self, **values): self.__dict__.update(values)
        return [Of(outputs=[Of(token_ids=[1] * each.values["max_tokens"])]) for each in params]
"""


def test_beside_transformers(tmp_path: Path, quire: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    SeeingModel(tmp_path / "model")
    file, shape = tmp_path / "figures.json", ("--image-size", "60x40", "--repeats", 1, "--num-threads", 1)
    asked = ("--task", "vision", "--situations", "image,image-8", "--peers", "transformers", "--json", file)
    assert quire("bench", "peers", tmp_path / "model", *asked, *shape) == 0
    figures = json.loads(file.read_text())
    for name in ("image", "image-8"):
        ours, theirs = (figures["situations"][name][engine] for engine in ("quire", "transformers"))
        assert ours["rounds"][0] > 0
        assert theirs["rounds"][0] > 0
        assert ours["limit"] is None
    assert "an image of 60 x 40 and a question, to the token 8, s (less is better)" in capsys.readouterr().out


def test_vllm_gets_messages_with_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "log"))
    engine = find_engine("vllm", PeerOptions(pythons={"vllm": sys.executable}), "vision")
    assert isinstance(engine, str)  # not in this environment
    engine = Engine(name="vllm", command=(sys.executable, str(PROGRAMS / "run_vllm_vision.py")))
    settings = engine_settings(Path("/models/x"), dtype="bfloat16", num_threads=1, max_model_len=4096, max_num_seqs=1)
    with PeerProcess(engine, settings, timeout_s=60) as peer:
        assert peer.run([ImageRequest(size=(30, 20), seed=1, output_len=4)]) > 0
    first, second = (json.loads(line) for line in (tmp_path / "log").read_text().splitlines())
    assert first[0] == [[112, 112]]
    assert second == [[[30, 20]], ["What is in this picture?"]]


def test_each_measurement_has_an_image_of_its_own() -> None:
    (situation,) = parse_vision_situations("image-3", (30, 20), 2048)
    requests: list[Any] = []

    def run(batch: Any) -> float:
        requests.extend(batch)
        return 2.0

    assert [situation.measure(run, seed) for seed in (0, 1)] == [2.0, 2.0]
    assert len({request.seed for request in requests}) == 4
    assert {request.output_len for request in requests} == {3}
    assert situation.max_model_len == 2048
    machine = MachineLimits(read_bytes_per_s=1e9, matmul_flop_per_s=1e9)
    work = ModelWork(weight_bytes=1, layer_parameters=1, head_parameters=1, kv_bytes_per_token=1, attention_flop=1)
    assert situation.limit(machine, work) is None


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="among first-token, image, image-N, memory, got 'decode'"):
        parse_vision_situations("image,decode", (30, 20), 2048)
    with pytest.raises(ConfigError, match="WIDTHxHEIGHT in pixels, got '30'"):
        parse_image_size("30")
    assert parse_image_size("728x504") == (728, 504)
    options = PeerOptions()
    assert find_engine("llama.cpp", options, "vision") == "has no program for messages with images here"
    ours = find_engine("quire", options, "vision")
    assert isinstance(ours, Engine)
    assert ours.command[1].endswith("run_quire_vision.py")
