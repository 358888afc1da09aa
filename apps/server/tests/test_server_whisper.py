"""A served Whisper: what its server says to those who want text of it, and what the real tiny.en hears over HTTP."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from quire.assemble import FACTORY as REAL_FACTORY
from quire.config import QuireConfig
from quire_testkit.media_files import RATE, wav_file
from quire_testkit.real_checkpoints import WHISPER_TINY_EN, real_checkpoint
from quire_testkit.tokenizers import write_tokenizer

SOUND = Path(__file__).resolve().parents[3] / "packages" / "llm" / "tests" / "sounds" / "river.ogg"
FIRST, SECOND = (
    "The price of bread has got up by 10% since January.",
    "The river is wide here and the bridge is very old.",
)


@pytest.fixture(scope="module")
def server(make_live: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("whisper")
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=300, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=16, max_source_positions=100,
        max_target_positions=64, decoder_start_token_id=5, eos_token_id=2, bos_token_id=2, pad_token_id=2,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    WhisperForConditionalGeneration(config).save_pretrained(folder)
    write_tokenizer(folder, vocab_size=300)
    own = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 22}
    engine = QuireConfig.of(model=str(folder), **own).to_dict()
    return make_live(folder=folder, factory=REAL_FACTORY, engine=engine, config=own)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}),
        ("/api/chat", {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}),
    ],
)
def test_routes_of_text_name_the_route_of_sound(server: Any, path: str, body: dict[str, Any]) -> None:
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    assert "/v1/audio/transcriptions" in response.text


def test_it_does_not_say_that_it_generates(server: Any) -> None:
    assert "generate" not in server.client.get("/v1/models").json()["data"][0]["tasks"]


@pytest.fixture(scope="module")
def tiny(make_live: Any) -> Any:
    folder = real_checkpoint(WHISPER_TINY_EN)
    own = {"dtype": "float32", "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 27}
    engine = QuireConfig.of(model=str(folder), **own).to_dict()
    return make_live(folder=folder, factory=REAL_FACTORY, engine=engine, config=own)


def test_a_recording_over_http(tiny: Any) -> None:
    """Times and texts are those of faster-whisper (packages/llm/tests/test_quire_transcribe.py)."""
    client = openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="-")
    arguments: dict[str, Any] = {"file": SOUND, "model": "tiny", "temperature": 0}
    subtitles = client.audio.transcriptions.create(response_format="srt", **arguments)
    assert str(subtitles).strip() == (
        f"1\n00:00:00,000 --> 00:00:04,400\n{FIRST}\n\n2\n00:00:05,400 --> 00:00:09,000\n{SECOND}"
    )
    verbose = client.audio.transcriptions.create(response_format="verbose_json", **arguments)
    assert [(each.start, each.end) for each in verbose.segments or ()] == [(0.0, 4.4), (5.4, 9.0)]
    assert (verbose.language, verbose.text) == ("en", f"{FIRST} {SECOND}")
    timed = client.audio.transcriptions.create(
        response_format="verbose_json", timestamp_granularities=["word"], **arguments
    )
    assert timed.segments is None
    spans = [(each.word, each.start, each.end) for each in timed.words or ()]
    assert (len(spans), spans[-1]) == (23, ("old.", pytest.approx(8.56, abs=0.04), pytest.approx(8.9, abs=0.04)))
    events = list(client.audio.transcriptions.create(stream=True, **arguments))
    deltas = [each.delta for each in events if each.type == "transcript.text.delta"]
    assert "".join(deltas) == verbose.text
    assert len(deltas) > 20  # words, not segments
    assert deltas[:2] == ["The", " price"]
    files = {"file": ("river.ogg", SOUND.read_bytes())}
    refused = tiny.client.post("/v1/audio/translations", files=files, data={"model": "tiny"})
    assert refused.status_code == 400
    assert "does not translate" in refused.json()["error"]["message"]


def test_log_probabilities_of_tokens(tiny: Any) -> None:
    """Their texts are the transcript, and their values those that a segment's mean is of, but for its times."""
    client = openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="-")
    arguments: dict[str, Any] = {"file": SOUND, "model": "tiny", "temperature": 0}
    whole = client.audio.transcriptions.create(include=["logprobs"], **arguments)
    tokens = whole.logprobs or []
    assert "".join(each.token or "" for each in tokens).strip() == whole.text == f"{FIRST} {SECOND}"
    assert b"".join(bytes(map(int, each.bytes or ())) for each in tokens).decode().strip() == whole.text
    assert all(-20 < (each.logprob or 0) <= 0 for each in tokens)
    done = None
    streamed: list[Any] = []
    for event in client.audio.transcriptions.create(include=["logprobs"], stream=True, **arguments):
        if event.type == "transcript.text.delta":
            assert "".join(each.token or "" for each in event.logprobs or ()).strip() == event.delta.strip()
            streamed += event.logprobs or ()
        else:
            done = event
    pairs = [(each.token, pytest.approx(each.logprob, abs=1e-4)) for each in tokens]
    assert done is not None
    assert [(each.token, each.logprob) for each in streamed] == pairs
    assert [(each.token, each.logprob) for each in done.logprobs or ()] == pairs
    with pytest.raises(openai.BadRequestError, match="response_format json"):
        client.audio.transcriptions.create(include=["logprobs"], response_format="verbose_json", **arguments)


def test_silence_is_an_empty_text(tiny: Any) -> None:
    client = openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="-")
    sound = ("silence.wav", wav_file(np.zeros(40 * RATE, np.float32)))
    assert client.audio.transcriptions.create(file=sound, model="tiny").text == ""


def test_live_sound(tiny: Any) -> None:
    samples, _ = soundfile.read(SOUND, dtype="float32")
    data = (samples * 32767).astype("<i2").tobytes()
    settings = {
        "format": {"type": "audio/pcm", "rate": RATE},
        "transcription": {"model": "tiny"},
        "turn_detection": None,
    }

    async def told() -> str:
        async with (
            openai.AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key="none") as client,
            client.realtime.connect(model="tiny", extra_query={"intent": "transcription"}) as connection,
        ):
            await connection.session.update(session={"type": "transcription", "audio": {"input": settings}})  # type: ignore[typeddict-item]
            for at in range(0, len(data), 6400):
                await connection.input_audio_buffer.append(audio=base64.b64encode(data[at : at + 6400]).decode())
            await connection.input_audio_buffer.commit()
            async for event in connection:
                if event.type == "conversation.item.input_audio_transcription.completed":
                    return event.transcript
        raise AssertionError("no transcript")

    words = re.findall(r"\w+", asyncio.run(told()).lower())
    assert words == re.findall(r"\w+", f"{FIRST} {SECOND}".lower())


def test_browsers_open_sessions_by_secrets(tiny: Any) -> None:
    settings: Any = {
        "type": "transcription",
        "audio": {"input": {"transcription": {"model": "tiny", "prompt": "Ada"}, "turn_detection": None}},
    }
    client = openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none")
    secret = client.realtime.client_secrets.create(
        session=settings, expires_after={"anchor": "created_at", "seconds": 30}
    )
    assert 0 < secret.expires_at - time.time() <= 31
    assert secret.session.type == "transcription"
    protocols = [Subprotocol("realtime"), Subprotocol(f"openai-insecure-api-key.{secret.value}")]
    with connect(f"{tiny.url.replace('http', 'ws')}/v1/realtime", subprotocols=protocols) as socket:
        assert socket.subprotocol == "realtime"
        created = json.loads(socket.recv())["session"]["audio"]["input"]
        assert (created["transcription"]["prompt"], created["turn_detection"]) == ("Ada", None)
    beta = tiny.client.post("/v1/realtime/transcription_sessions", json={"input_audio_format": "g711_ulaw"}).json()
    assert (beta["input_audio_format"], beta["client_secret"]["value"][:3]) == ("g711_ulaw", "ek_")
    for body, param in (
        ({"session": {"type": "realtime"}}, "session.type"),
        ({"expires_after": {"seconds": 1}}, "expires_after.seconds"),
        ({"session": {"type": "transcription", "audio": {"input": {"transcription": {"model": "nobody"}}}}}, "model"),
    ):
        refused = tiny.client.post("/v1/realtime/client_secrets", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) in ((400, param), (404, param))


def test_nothing_tells_speakers_apart(tiny: Any) -> None:
    sound = wav_file(np.zeros(RATE, np.float32))
    response = tiny.client.post(
        "/v1/audio/transcriptions", files={"file": ("a.wav", sound)}, data={"response_format": "diarized_json"}
    )
    assert response.status_code == 400
    assert "--diarizer-plugin" in response.json()["error"]["message"]
