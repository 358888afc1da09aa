"""A random multilingual Whisper beside Transformers: which language is heard and how probable it is, and the tokens of
windows with a language, a task and a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from numpy.typing import NDArray

from quire import LLM
from quire_interfaces import RequestError
from quire_speech import TranscriptionOptions
from quire_testkit.multilingual_whisper import NUM_TOKENS, MultilingualWhisper

SOUND = Path(__file__).parent / "sounds" / "river.ogg"
GREEDY: dict[str, Any] = {
    "temperatures": (0.0,), "max_tokens": NUM_TOKENS, "no_speech_threshold": None, "logprob_threshold": None,
    "compression_ratio_threshold": None, "condition_on_previous_text": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> MultilingualWhisper:
    return MultilingualWhisper(tmp_path_factory.mktemp("multilingual"))


@pytest.fixture(scope="module")
def llm(whisper: MultilingualWhisper) -> Iterator[LLM]:
    with LLM(str(whisper.folder), dtype="float32", kv_cache_memory_bytes=1 << 22, num_threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def sounds() -> list[NDArray[np.float32]]:
    """Nine seconds of speech; five windows, of which the last one is not full."""
    speech = np.asarray(soundfile.read(SOUND, dtype="float32")[0], np.float32)
    noise = np.random.default_rng(0).standard_normal(len(speech)).astype(np.float32)
    return [speech, speech[::-1].copy(), 0.05 * noise, speech[40_000:] * np.float32(0.1)]


def test_the_language_is_what_transformers_hears(
    llm: LLM, whisper: MultilingualWhisper, sounds: list[NDArray[np.float32]]
) -> None:
    found = llm.transcribe(sounds, TranscriptionOptions(**GREEDY))
    told = [(each.language, each.language_probability) for each in found]
    expected = [whisper.language_of(sound) for sound in sounds]
    assert [code for code, _ in told] == [code for code, _ in expected]
    assert [share for _, share in told] == pytest.approx([share for _, share in expected], rel=1e-3)
    assert len({code for code, _ in told}) > 1, "sounds of one language would say nothing"


def test_it_translates_into_english_alone(llm: LLM, sounds: list[NDArray[np.float32]]) -> None:
    with pytest.raises(RequestError, match="into English alone") as refused:
        llm.transcribe(sounds[0], TranscriptionOptions(task="translate", to_language="German"))
    assert refused.value.param == "to_language"


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({}, {"task": "transcribe"}),
        ({"language": "de"}, {"language": "de"}),
        ({"language": "Swahili"}, {"language": "sw"}),
        ({"language": "ja", "task": "translate"}, {"language": "ja", "task": "translate"}),
        ({"task": "translate"}, {"task": "translate"}),
        ({"language": "en", "hotwords": "Ada, Grace"}, {"language": "en", "prompt_ids": "Ada, Grace"}),
        (
            {"language": "en", "prompt": "Ada, Grace", "condition_on_previous_text": True},
            {"language": "en", "prompt_ids": "Ada, Grace", "condition_on_prev_tokens": True},
        ),
    ],
)
def test_segments_are_those_of_transformers(
    llm: LLM, whisper: MultilingualWhisper, sounds: list[NDArray[np.float32]], options: Any, arguments: Any
) -> None:
    if "prompt_ids" in arguments:
        text = f" {arguments['prompt_ids']}"
        ids = [whisper.ids["startofprev"], *whisper.tokenizer(text, add_special_tokens=False).input_ids]
        arguments = {**arguments, "prompt_ids": torch.tensor(ids)}
    (found,) = llm.transcribe(sounds[0], TranscriptionOptions(**GREEDY | options))
    segments = [
        (round(each.start_s, 2), round(each.end_s, 2), whisper.text_ids(each.token_ids)) for each in found.segments
    ]
    assert segments == whisper.segments(sounds[0], **arguments)


def test_unknown_languages_are_refused_by_name(llm: LLM, sounds: list[NDArray[np.float32]]) -> None:
    with pytest.raises(RequestError, match="does not know cantonese") as refused:
        llm.transcribe(sounds[0], TranscriptionOptions(language="yue"))
    assert refused.value.param == "language"
