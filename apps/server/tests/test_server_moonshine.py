"""A served Moonshine, and one of the streaming kind, which hear and read no text: transcripts are those of
Transformers, and the rest is refused."""

from __future__ import annotations

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from server_hearing_models import NUM_TOKENS, RECORDING, heard_window, transcript
from websockets.sync.client import connect

from quire_testkit.media_files import RATE, tone, wav_file
from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.tokenizers import write_tokenizer


class Served(NamedTuple):
    """A server, and the network of its checkpoint."""

    live: Any
    folder: Path
    network: Any


@pytest.fixture(scope="module", params=["Moonshine", "MoonshineStreaming"])
def served(request: pytest.FixtureRequest, make_hearing: Any, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder, architecture = tmp_path_factory.mktemp(request.param), f"{request.param}ForConditionalGeneration"
    case = ENCODER_CASES[architecture]
    fields = {**case.fields, "vocab_size": 300, "eos_token_id": None}
    network = write_checkpoint(folder, architecture, dataclasses.replace(case, fields=fields))
    write_tokenizer(folder, vocab_size=300)
    return Served(make_hearing(folder), folder, network)


def test_recordings_over_http(served: Served) -> None:
    start_s, heard = heard_window()
    extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=False)
    frame_len = 80 if "Streaming" in type(served.network).__name__ else None  # which its processor fills
    inputs = extractor(heard, sampling_rate=RATE, padding=True, pad_to_multiple_of=frame_len, return_tensors="pt")
    with torch.inference_mode():
        found = served.network.generate(
            inputs["input_values"],
            attention_mask=torch.ones_like(inputs["input_values"]),  # without one, there are no windows
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
    text = transcript(served.folder, found[0, 1:])
    fields, client = {"max_completion_tokens": str(NUM_TOKENS), "response_format": "verbose_json"}, served.live.client
    answer = client.post("/v1/audio/transcriptions", files={"file": ("a.wav", wav_file(RECORDING))}, data=fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["text"] == text
    unbounded = client.post("/v1/audio/transcriptions", files={"file": ("a.wav", wav_file(RECORDING))})
    assert unbounded.status_code == 200, unbounded.text
    assert unbounded.json()["text"].startswith(text)
    assert [each["start"] for each in answer.json()["segments"]] == [start_s]


def test_live_sound(served: Served) -> None:
    """A turn that grows is transcribed as a file of its sound."""
    whole = served.live.client.post("/v1/audio/transcriptions", files={"file": ("a.wav", wav_file(RECORDING))})
    data = (RECORDING * 32768).astype("<i2").tobytes()
    sound = {"format": {"type": "audio/pcm", "rate": RATE}, "turn_detection": None}
    with connect(f"{served.live.url.replace('http', 'ws')}/v1/realtime?intent=transcription") as socket:

        def send(**event: Any) -> None:
            socket.send(json.dumps(event))

        send(type="session.update", session={"type": "transcription", "audio": {"input": sound}})
        for at in range(0, len(data), 16_000):
            send(type="input_audio_buffer.append", audio=base64.b64encode(data[at : at + 16_000]).decode())
        send(type="input_audio_buffer.commit")
        event: dict[str, Any] = {"type": ""}
        while not event["type"].endswith(".completed"):
            event = json.loads(socket.recv(60))
            assert "error" not in event, event
    assert event["transcript"] == whole.json()["text"]


def test_they_say_what_they_do_and_refuse_the_rest(served: Served) -> None:
    client = served.live.client
    assert client.get("/v1/models").json()["data"][0]["tasks"] == ["transcription"]
    files = {"file": ("a.wav", wav_file(tone(1)))}
    translated = client.post("/v1/audio/translations", files=files)
    assert (translated.status_code, translated.json()["error"]["param"]) == (400, "model")
    asked = client.post("/v1/audio/transcriptions", files=files, data={"prompt": "Ada"})
    assert (asked.status_code, asked.json()["error"]["param"]) == (400, "prompt")
    chat = served.live.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]})
    assert chat.status_code == 400
    assert "/v1/audio/transcriptions" in chat.text
