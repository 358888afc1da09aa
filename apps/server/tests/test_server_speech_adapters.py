"""What a multilingual Whisper hears over HTTP, with and without an adapter, in its language and in English: tokens of
Transformers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from quire.assemble import FACTORY as REAL_FACTORY
from quire.config import QuireConfig
from quire_testkit.media_files import RATE, wav_file
from quire_testkit.multilingual_whisper import NUM_TOKENS, MultilingualWhisper

SOUND = Path(__file__).resolve().parents[3] / "packages" / "llm" / "tests" / "sounds" / "river.ogg"


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> MultilingualWhisper:
    """Sure of its words: others are looked for at higher temperatures where they are improbable."""
    whisper = MultilingualWhisper(tmp_path_factory.mktemp("multilingual"))
    whisper.network.model.decoder.layer_norm.weight.data *= 16
    whisper.network.save_pretrained(whisper.folder)
    return whisper


@pytest.fixture(scope="module")
def adapted(whisper: MultilingualWhisper, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """An adapter, and the network with its weights added."""
    folder, merged = tmp_path_factory.mktemp("adapter"), copy.deepcopy(whisper.network)
    chooser, tensors = torch.Generator().manual_seed(1), {}
    for name, module in merged.named_modules():
        if name.endswith(("q_proj", "v_proj")):
            outputs, inputs = module.weight.shape
            a, b = (torch.randn(shape, generator=chooser) * 0.3 for shape in ((4, inputs), (outputs, 4)))
            tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
            module.weight.data += 2 * b @ a
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder, merged


@pytest.fixture(scope="module")
def server(make_live: Any, whisper: MultilingualWhisper, adapted: tuple[Path, Any]) -> Any:
    own = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 22, "enable_lora": True, "max_loras": 1}
    own |= {"lora_modules": (f"voice={adapted[0]}",)}
    engine = QuireConfig.of(model=str(whisper.folder), **own).to_dict()
    return make_live(folder=whisper.folder, factory=REAL_FACTORY, engine=engine, config=own)


@pytest.fixture(scope="module")
def speech() -> NDArray[np.float32]:
    """Heard in one piece, as it is short: a window is told from silence by the loudest frame that was heard so far."""
    samples = np.asarray(soundfile.read(SOUND, dtype="float32")[0], np.float32)[: 4 * RATE]
    return np.asarray(np.round(samples * 32767) / 32768, np.float32)


@pytest.mark.parametrize("task", ["transcribe", "translate"])
def test_adapters_and_translations(
    server: Any, whisper: MultilingualWhisper, adapted: tuple[Path, Any], speech: NDArray[np.float32], task: str
) -> None:
    """Of the first window: others read what the one before them wrote, in a form of faster-whisper's."""
    route = "transcriptions" if task == "transcribe" else "translations"
    tokens: dict[str, Any] = {}
    for model, network in (("tiny", whisper.network), ("voice", adapted[1])):
        data = {
            "model": model,
            "response_format": "verbose_json",
            "max_completion_tokens": NUM_TOKENS,
            "language": "de",
        }
        response = server.client.post(f"/v1/audio/{route}", files={"file": ("a.wav", wav_file(speech))}, data=data)
        told = [
            (round(each["start"], 2), round(each["end"], 2), whisper.text_ids(each["tokens"]))
            for each in response.json()["segments"]
            if each["seek"] == 0
        ]
        expected = whisper.segments(speech, network=network, language="de", task=task)
        assert told == expected[: len(told)] != []
        tokens[model] = told
    assert tokens["tiny"] != tokens["voice"]
