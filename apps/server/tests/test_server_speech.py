"""Speech over HTTP: forms of OpenAI's client and of vLLM's, every format, streams, and what is refused.

The model is a tiny random one that hears in conversations; its words are those of Transformers for the same stretches.
"""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from quire.assemble import FACTORY as REAL_FACTORY
from quire.config import QuireConfig
from quire_server.cli import main
from quire_speech.voice_activity import SpeechWindows
from quire_testkit.media_files import RATE, clip, tone, video_file, wav_file
from quire_testkit.media_models import MediaModel

PATH, NUM_TOKENS = "/v1/audio/transcriptions", 5
QUESTION = "Transcribe the speech word for word. Answer with the text alone."


def spoken(*spans: tuple[float, float], seconds: float) -> NDArray[np.float32]:
    """Sound at these times, silence between."""
    sound = np.zeros(int(seconds * RATE), np.float32)
    for index, (start, end) in enumerate(spans):
        sound[int(start * RATE) : int(end * RATE)] = tone(index + 1, end - start)[: int(end * RATE) - int(start * RATE)]
    return np.asarray(np.round(sound * 32767) / 32768, np.float32)


SPEECH = spoken((1.0, 2.2), (5.0, 6.5), seconds=8.0)
WAV = wav_file(SPEECH)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MediaModel:
    return MediaModel(tmp_path_factory.mktemp("hearing"), "Qwen2AudioForConditionalGeneration")


@pytest.fixture(scope="module")
def server(make_live: Any, model: MediaModel) -> Any:
    own = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 24}
    config = QuireConfig.of(model=str(model.folder), **own)
    limits = {"audio_max_seconds": 60.0, "audio_max_bytes": 1 << 22}
    return make_live(folder=model.folder, factory=REAL_FACTORY, engine=config.to_dict(), config=own, **limits)


@pytest.fixture(scope="module")
def windows() -> list[tuple[float, NDArray[np.float32]]]:
    """Where the server hears speech: its model takes two seconds at a time."""
    cutter = SpeechWindows(2.0)
    return [*cutter.feed(SPEECH), *cutter.finish()]


@pytest.fixture(scope="module")
def texts(model: MediaModel, windows: list[tuple[float, NDArray[np.float32]]]) -> list[str]:
    """Of each stretch, by Transformers."""
    rendered = f"<|im_start|>user\n<|AUDIO|>{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    tokens = [model.expected(rendered, NUM_TOKENS, audio=[samples]) for _, samples in windows]
    return [model.processor.tokenizer.decode(each, skip_special_tokens=True).strip() for each in tokens]


def post(server: Any, data: bytes = WAV, path: str = PATH, name: str = "speech.wav", **fields: Any) -> httpx.Response:
    values = {"max_completion_tokens": str(NUM_TOKENS), **fields}
    response: httpx.Response = server.client.post(path, files={"file": (name, data)}, data=values)
    return response


def test_transcriptions_are_the_texts_of_the_stretches(server: Any, texts: list[str]) -> None:
    assert len(texts) == 2
    answer = post(server).json()
    assert answer == {"text": " ".join(texts), "usage": {"type": "duration", "seconds": 8}}


def test_openais_client(server: Any, texts: list[str], windows: list[Any]) -> None:
    with server.openai() as client:
        check_client(client, texts, windows)


def check_client(client: openai.OpenAI, texts: list[str], windows: list[Any]) -> None:
    more: dict[str, Any] = {"model": "tiny", "extra_body": {"max_completion_tokens": NUM_TOKENS}}
    file = ("speech.wav", WAV)
    assert client.audio.transcriptions.create(file=file, **more).text == " ".join(texts)
    verbose = client.audio.transcriptions.create(
        file=file, response_format="verbose_json", timestamp_granularities=["segment"], language="en", **more
    )
    assert verbose.duration == 8.0
    assert verbose.language == "en"
    assert verbose.words is None
    starts = [each.start for each in verbose.segments]
    assert starts == [start for start, _ in windows]
    assert starts == pytest.approx([0.8, 4.8], abs=0.1)
    events = list(client.audio.transcriptions.create(file=file, stream=True, **more))
    assert [each.type for each in events] == ["transcript.text.delta"] * 2 + ["transcript.text.done"]
    assert "".join(each.delta for each in events[:-1]) == events[-1].text == " ".join(texts)
    assert events[-1].usage.output_tokens == 2 * NUM_TOKENS
    chunked = client.audio.transcriptions.create(
        file=file, chunking_strategy={"type": "server_vad", "silence_duration_ms": 500}, **more
    )
    assert chunked.usage.seconds == 8
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the client: translations are Whisper's alone
        assert client.audio.translations.create(file=file, **more).text
    with pytest.raises(openai.BadRequestError, match="speaks nothing"):
        client.audio.speech.create(input="hello", model="tiny", voice="alloy")


def test_every_format(server: Any, texts: list[str]) -> None:
    assert post(server, response_format="text").text == " ".join(texts) + "\n"
    srt = post(server, response_format="srt")
    assert srt.headers["content-type"].startswith("text/plain")
    assert srt.text.startswith("1\n00:00:00,")
    assert srt.text.count(" --> ") == 2
    assert texts[1].splitlines()[0].strip() in srt.text
    vtt = post(server, response_format="vtt")
    assert vtt.headers["content-type"].startswith("text/vtt")
    assert vtt.text.startswith("WEBVTT\n\n00:00:00.")


def test_streams_are_vllms_chunks_too(server: Any, texts: list[str]) -> None:
    response = post(server, stream="true", stream_include_usage="true", response_format="srt")
    *events, done, _ = response.text.split("\n\n")
    assert done == "data: [DONE]"
    chunks = [json.loads(each.removeprefix("data: ")) for each in events]
    assert {each["object"] for each in chunks} == {"transcription.chunk"}
    whole = "".join(each["choices"][0]["delta"]["content"] for each in chunks)
    assert whole == post(server, response_format="srt").text
    assert chunks[-1]["usage"]["completion_tokens"] == 2 * NUM_TOKENS
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_silence_is_an_empty_transcript(server: Any) -> None:
    silence = wav_file(np.zeros(3 * RATE, np.float32))
    assert post(server, silence).json() == {"text": "", "usage": {"type": "duration", "seconds": 3}}
    assert post(server, silence, response_format="vtt", chunking_strategy="auto").text == "WEBVTT\n\n"


def test_other_containers(server: Any, texts: list[str]) -> None:
    flac = io.BytesIO()
    import soundfile

    soundfile.write(flac, SPEECH, RATE, format="FLAC", subtype="PCM_16")
    assert post(server, flac.getvalue(), name="speech.bin").json()["text"] == " ".join(texts)
    assert post(server, video_file(clip(1, 12), SPEECH[: 6 * RATE])).status_code == 200


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"Dear sirs,\n" * 99, "no sound that can be read"),
        (video_file(clip(1, 4)), "no sound in it"),
        (WAV[:50], "no samples|cannot be decoded"),
        (wav_file(np.zeros(90 * RATE, np.float32)), "larger than|90 s long"),
        (wav_file(np.zeros(61 * RATE // 2, np.float32), RATE // 2), "61 s long"),
    ],
    ids=["empty", "text", "silent video", "cut", "large", "long"],
)
def test_files_that_are_refused(server: Any, data: bytes, words: str) -> None:
    response = post(server, data)
    error = response.json()["error"]
    assert response.status_code in (400, 413), error
    assert error["param"] == "file"
    assert any(word in error["message"] for word in words.split("|")), error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "xml"}, "response_format"),
        ({"response_format": "diarized_json"}, "response_format"),
        ({"temperature": "3"}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"language": "???"}, "language"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        ({"timestamp_granularities[]": "word", "response_format": "verbose_json"}, "timestamp_granularities"),
        ({"include[]": "logprobs"}, "include"),
        ({"stream_include_usage": "true"}, "stream_include_usage"),
        ({"n": "4"}, "n"),
        ({"max_completion_tokens": "0"}, "max_completion_tokens"),
        ({"top_p": "2"}, "top_p"),
        ({"chunking_strategy[type]": "server_vad", "chunking_strategy[threshold]": "7"}, "threshold"),
        ({"chunking_strategy": "sometimes"}, "chunking_strategy"),
        ({"priority": "3"}, "priority"),
        ({"prompt": "x" * 20_000}, "prompt"),
    ],
)
def test_fields_that_are_refused(server: Any, fields: dict[str, str], param: str) -> None:
    response = post(server, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].split(".")[0].split("[")[0] == param, response.text


def test_models_say_what_they_can(server: Any, live: Any) -> None:
    assert server.client.get("/v1/models").json()["data"][0]["tasks"] == ["generate", "transcription", "translation"]
    assert live.client.get("/v1/models/tiny").json()["tasks"] == ["generate"]


def test_requests_that_are_no_form(server: Any, live: Any) -> None:
    assert server.post(PATH, {"model": "tiny"}).status_code == 415
    missing = server.client.post(PATH, files={"other": ("a.wav", b"RIFF")})
    assert missing.json()["error"]["param"] == "file"
    assert post(server, model="another").status_code == 404
    refused = post(live)
    assert refused.status_code == 400
    assert "no speech model" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "model"
    assert post(server, path="/v1/audio/translations", to_language="de").json()["error"]["param"] == "to_language"


def command_line(server: Any, *arguments: str) -> int:
    return main(["transcribe", *arguments, "--url", server.url, "--language", "en"])


def test_the_command_writes_files_and_goes_on_where_one_is_none(
    server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound, words, out = tmp_path / "talk.wav", tmp_path / "words.wav", tmp_path / "out"
    sound.write_bytes(WAV)
    words.write_bytes(b"no sound at all" * 9)
    assert command_line(server, str(sound)) == 0
    fields = {"max_completion_tokens": "448", "language": "en"}
    whole = post(server, response_format="text", **fields).text
    assert capsys.readouterr().out == whole
    assert command_line(server, str(words), str(sound), "--format", "srt", "--output-dir", str(out), "--vad") == 1
    assert "no sound that can be read" in capsys.readouterr().err
    assert [each.name for each in out.iterdir()] == ["talk.srt"]
    subtitles = post(server, response_format="srt", chunking_strategy="auto", **fields).text
    assert (out / "talk.srt").read_text() == subtitles
    assert command_line(server, str(tmp_path / "missing.wav")) == 2
