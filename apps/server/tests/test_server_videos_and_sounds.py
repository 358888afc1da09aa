"""Videos and sounds over HTTP: answers are those of Transformers after its processor's joint call."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.assemble import FACTORY as REAL_FACTORY
from quire.config import QuireConfig
from quire_testkit.media_files import VideoClip, clip, media_url, read_clip, tone, video_file, wav_file
from quire_testkit.media_models import MediaModel
from quire_testkit.seeing_models import data_url, drawing, image_part, text_part

NUM_TOKENS, NUM_FRAMES = 6, 6
OPTIONS = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
FILES = {
    "clip.mp4": video_file(clip(1, 12), tone(3, 6.0)),
    "other.mp4": video_file(clip(5, 12, (40, 64))),
    "long.mp4": video_file(clip(1, 30)),
    "tone.wav": wav_file(tone(1)),
    "long.wav": wav_file(tone(1, 11.0)),
}


class Model(MediaModel):
    """A thinker that sees, watches and hears."""

    def answer(self, text: str, **media: Any) -> list[int]:
        """Tokens after a message of the user with this text."""
        options = {"do_sample_frames": False} if "videos" in media else {}
        rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        return self.expected(rendered, NUM_TOKENS, **media, **options, **self.family.call_arguments)


def shown(name: str) -> VideoClip:
    """The frames of a file that the server shows."""
    video = read_clip(FILES[name])
    return VideoClip(video.frames[np.linspace(0, len(video.frames) - 1, NUM_FRAMES).astype(int)], video.fps)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("thinker"), "Qwen2_5OmniThinkerForConditionalGeneration")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files."""
    folder = tmp_path_factory.mktemp("shelf")
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    """A web server with the files."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = FILES.get(self.path.strip("/"), b"")
            self.send_response(200 if data else 404)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            """Write nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{web.server_port}"
        web.shutdown()


@pytest.fixture(scope="module")
def server(make_live: Any, model: Model, shelf: Path) -> Any:
    own = {
        "dtype": "float32",
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 1 << 24,
        "mm_processor_kwargs": dict(model.family.call_arguments),
        "media_io_kwargs": {"video": {"num_frames": NUM_FRAMES}},
        "limit_mm_per_prompt": {"video": 2},
        "media_max_seconds": 10.0,
        "allowed_local_media_path": str(shelf),
        "allow_private_media_addresses": True,
    }
    config = QuireConfig.of(model=str(model.folder), **own)
    return make_live(folder=model.folder, factory=REAL_FACTORY, engine=config.to_dict(), config=own)


def url_part(kind: str, url: str) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def answered(server: Any, content: Any, **more: Any) -> list[int]:
    body = {"messages": [{"role": "user", "content": content}], **OPTIONS, **more}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["choices"][0]["token_ids"]
    return tokens


def test_videos_and_sounds_of_every_source(model: Model, server: Any, shelf: Path, host: str) -> None:
    tokens = model.family.placeholders
    watched = model.answer(f"see {tokens['video']}", videos=[shown("clip.mp4")])
    for url in (media_url(FILES["clip.mp4"], "video/mp4"), f"file://{shelf}/clip.mp4", f"{host}/clip.mp4"):
        assert answered(server, [text_part("see "), url_part("video", url)]) == watched, url[:40]
    heard = model.answer(f"hear {tokens['audio']}", audio=[tone(1)])
    data = media_url(FILES["tone.wav"], "audio/wav")
    named = {"type": "input_audio", "input_audio": {"data": data.partition(",")[2], "format": "wav"}}
    urls = (data, f"file://{shelf}/tone.wav", f"{host}/tone.wav")
    for part in (named, *(url_part("audio", url) for url in urls)):
        assert answered(server, [text_part("hear "), part]) == heard, str(part)[:80]


def test_all_kinds_between_texts(model: Model, server: Any, host: str) -> None:
    tokens = model.family.placeholders
    content = [
        url_part("video", f"{host}/clip.mp4"),
        text_part(" first "),
        image_part(2),
        url_part("audio", f"{host}/tone.wav"),
        text_part(" then "),
        url_part("video", f"{host}/other.mp4"),
    ]
    text = f"{tokens['video']} first {tokens['image']}{tokens['audio']} then {tokens['video']}"
    videos = [shown("clip.mp4"), shown("other.mp4")]
    expected = model.answer(text, videos=videos, images=[drawing(2)], audio=[tone(1)])
    assert answered(server, content) == expected
    assert answered(server, [content[-1], *content[1:-1], content[0]]) != expected


def test_a_request_may_ask_for_the_sound_of_a_video(server: Any, host: str) -> None:
    content = [text_part("see "), url_part("video", f"{host}/clip.mp4")]
    silent = answered(server, content)
    assert answered(server, content, mm_processor_kwargs={"use_audio_in_video": True}) != silent
    assert answered(server, content, mm_processor_kwargs={"use_audio_in_video": False}) == silent
    mute = [text_part("see "), url_part("video", f"{host}/other.mp4")]
    assert answered(server, mute, mm_processor_kwargs={"use_audio_in_video": True}) == answered(server, mute)


def test_responses_watch_and_hear(server: Any) -> None:
    video, sound = media_url(FILES["clip.mp4"], "video/mp4"), media_url(FILES["tone.wav"], "audio/wav")
    body = {"messages": [{"role": "user", "content": [url_part("video", video), url_part("audio", sound)]}], **OPTIONS}
    chat = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    named = {"type": "input_audio", "input_audio": {"data": sound.partition(",")[2], "format": "wav"}}
    files = [{"type": "input_file", "filename": "x", "file_data": each} for each in (video, sound)]
    for parts in ([files[0], named], files, [{"type": "input_video", "video_url": video}, files[1]]):
        body = {"input": [{"role": "user", "content": parts}], "temperature": 0, "max_output_tokens": NUM_TOKENS}
        response = server.post("/v1/responses", {**body, "model": "tiny", "ignore_eos": True})
        assert response.status_code == 200, response.text
        assert response.json()["output"][0]["content"][0]["text"] == chat


@pytest.mark.parametrize(
    ("part", "complaint", "code"),
    [
        (url_part("video", data_url(drawing(1))), "", "invalid_media"),
        (url_part("video", media_url(FILES["clip.mp4"][:200], "video/mp4")), "", "invalid_media"),
        (url_part("video", media_url(FILES["tone.wav"], "video/mp4")), "no video", "invalid_media"),
        (url_part("video", media_url(FILES["long.mp4"], "video/mp4")), "10 s allowed", "media_too_large"),
        (url_part("audio", media_url(FILES["long.wav"], "audio/wav")), "10 s allowed", "media_too_large"),
        (url_part("audio", media_url(FILES["other.mp4"], "audio/mp4")), "no sound", "invalid_media"),
        (url_part("audio", media_url(wav_file(tone(1, 0)), "audio/wav")), "no samples", "invalid_media"),
        (url_part("audio", "file:///etc/hostname"), "not below", "media_not_allowed"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "data in base64", "invalid_media"),
        ({"type": "video_url", "video_url": {}}, "url", "invalid_media"),
    ],
)
def test_a_bad_part_fails_its_request_by_name(server: Any, part: dict[str, Any], complaint: str, code: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": [text_part("b"), image_part(1), part]}]
    response = server.post("/v1/chat/completions", {"messages": messages, **OPTIONS})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, code), error
    assert error["param"] == "messages[1].content[2]"
    assert complaint in error["message"]


def test_more_videos_than_a_prompt_may_hold(server: Any, host: str) -> None:
    parts = [url_part("video", f"{host}/clip.mp4")] * 3
    response = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}], **OPTIONS})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "too_many_media"), error
    assert error["param"] == "messages[0].content[2]"
    assert "at most 2 of video" in error["message"]


def test_arguments_of_a_request_decide_the_frames(server: Any, host: str) -> None:
    content = [url_part("video", f"{host}/clip.mp4")]
    small = {"videos_kwargs": {"size": {"shortest_edge": 256, "longest_edge": 1024}}}
    assert answered(server, content, mm_processor_kwargs=small) != answered(server, content)
    body = {"messages": [{"role": "user", "content": content}], **OPTIONS, "mm_processor_kwargs": {"fps": "fast"}}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "messages[0].content[0]"
