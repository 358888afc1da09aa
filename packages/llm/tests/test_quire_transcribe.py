"""Recordings to text by the real Whisper tiny.en, beside what faster-whisper 1.2.1 wrote of the same samples with the
same weights in float32 (beam_size=1, temperature=0). The sound is recording 1 of
apps/bench/benchmarks/spoken_texts.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from quire import LLM, AsyncLLM, QuireConfig
from quire.speech.transcribers import Hearing
from quire.speech.whisper_transcriber import WhisperTranscriber
from quire_interfaces import RequestError, RequestOptions
from quire_speech import Segment, Transcription, TranscriptionOptions
from quire_testkit.real_checkpoints import WHISPER_TINY_EN, real_checkpoint

SOUND = Path(__file__).parent / "sounds" / "river.ogg"
SETTINGS = {"dtype": "float32", "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 27}
GREEDY = TranscriptionOptions(temperatures=(0.0,))
EXPECTED = [
    (0.0, 4.4, " The price of bread has got up by 10% since January."),
    (5.4, 9.0, " The river is wide here and the bridge is very old."),
]
WORDS = [
    (" The", 0.0, 0.38), (" price", 0.38, 0.7), (" of", 0.7, 0.98), (" bread", 0.98, 1.2), (" has", 1.2, 1.48),
    (" got", 1.48, 1.66), (" up", 1.66, 1.96), (" by", 1.96, 2.22), (" 10", 2.22, 2.56), ("%", 2.56, 3.22),
    (" since", 3.22, 3.66), (" January.", 3.66, 4.54), (" The", 5.56, 5.78), (" river", 5.78, 5.96),
    (" is", 5.96, 6.22), (" wide", 6.22, 6.58), (" here", 6.58, 7.04), (" and", 7.04, 7.62), (" the", 7.62, 7.84),
    (" bridge", 7.84, 7.98), (" is", 7.98, 8.3), (" very", 8.3, 8.56), (" old.", 8.56, 8.9),
]  # fmt: skip
"""As faster-whisper tells them (word_timestamps=True)."""
NEAR_S = 0.04
AVG_LOGPROB, NO_SPEECH_PROB, COMPRESSION_RATIO = -0.4754, 0.0374, 1.1209


@pytest.fixture(scope="module")
def folder() -> Path:
    return real_checkpoint(WHISPER_TINY_EN)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    llm = LLM(str(folder), **SETTINGS)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def samples() -> NDArray[np.float32]:
    found, rate = soundfile.read(SOUND, dtype="float32")
    assert rate == 16_000
    return np.asarray(found, np.float32)


def told(segments: Any) -> list[tuple[float, float, str]]:
    return [(round(each.start_s, 2), round(each.end_s, 2), each.text) for each in segments]


def check(found: Transcription) -> None:
    assert told(found.segments) == EXPECTED
    for segment in found.segments:
        assert segment.avg_logprob == pytest.approx(AVG_LOGPROB, abs=1e-3)
        assert segment.no_speech_prob == pytest.approx(NO_SPEECH_PROB, abs=1e-3)
        assert segment.compression_ratio == pytest.approx(COMPRESSION_RATIO, abs=1e-4)
    assert (found.language, found.language_probability) == ("en", 1.0)


def test_text_and_times_are_those_of_faster_whisper(llm: LLM, samples: NDArray[np.float32]) -> None:
    silence = np.zeros(16_000 * 45, np.float32)
    late = np.concatenate([np.zeros(16_000 * 31, np.float32), samples])
    whole, silent, behind = llm.transcribe([samples, silence, late], GREEDY)
    check(whole)
    assert (silent.text, silent.segments, silent.duration_s) == ("", (), 45.0)
    assert "bridge is very old" in behind.text
    assert all(30 <= each.start_s < each.end_s <= 42 for each in behind.segments)


def test_times_of_words_are_those_of_faster_whisper(llm: LLM, samples: NDArray[np.float32]) -> None:
    late = np.concatenate([np.zeros(16_000 * 31, np.float32), samples])
    options = TranscriptionOptions(temperatures=(0.0,), word_timestamps=True)
    found, behind = llm.transcribe([samples, late], options)
    words = [word for each in found.segments for word in each.words or ()]
    assert [each.text for each in words] == [text for text, _, _ in WORDS]
    for word, (_, start_s, end_s) in zip(words, WORDS, strict=True):
        assert word.start_s == pytest.approx(start_s, abs=NEAR_S)
        assert word.end_s == pytest.approx(end_s, abs=NEAR_S)
        assert 0 < word.probability <= 1
    for segment in (*found.segments, *behind.segments):
        assert segment.words is not None
        assert (segment.start_s, segment.end_s) == (segment.words[0].start_s, segment.words[-1].end_s)
    assert all(30 <= word.start_s <= word.end_s <= 42 for each in behind.segments for word in each.words or ())


def test_files_are_read_in_pieces(llm: LLM) -> None:
    from_path, from_bytes = llm.transcribe([str(SOUND), SOUND.read_bytes()], GREEDY)
    assert told(from_path.segments) == told(from_bytes.segments)
    assert "The river is wide here" in from_path.text


def test_beams_find_what_faster_whisper_finds(llm: LLM, samples: NDArray[np.float32]) -> None:
    (found,) = llm.transcribe(samples, TranscriptionOptions(temperatures=(0.0,), beam_size=5))
    assert told(found.segments) == [
        (0.0, 4.4, " The price of bread has got up my 10% since January."),
        (5.4, 9.0, " The river is wide here and the bridge is very old."),
    ]


def test_prompts_and_bounds_reach_the_model(llm: LLM, samples: NDArray[np.float32]) -> None:
    options = TranscriptionOptions(temperatures=(0.0,), prompt="PRICES, RIVERS", timestamps=False, max_tokens=4)
    (found,) = llm.transcribe(samples, options)
    (segment,) = found.segments
    assert len(segment.token_ids) == 4
    assert (segment.start_s, segment.end_s) == (0.0, pytest.approx(found.duration_s, abs=0.01))


@pytest.mark.parametrize(
    ("recording", "options", "param"),
    [
        ("nowhere.wav", GREEDY, "recordings"),
        (b"only letters, and not a sound at all", GREEDY, None),
        (7, GREEDY, "recordings"),
        (SOUND, TranscriptionOptions(language="de"), "language"),
        (SOUND, TranscriptionOptions(task="translate"), "task"),
    ],
)
def test_what_cannot_be_transcribed_is_refused(llm: LLM, recording: Any, options: Any, param: str | None) -> None:
    with pytest.raises(RequestError) as refused:
        llm.transcribe(recording, options)
    assert refused.value.param == param


def test_models_of_texts_say_that_they_transcribe_nothing() -> None:
    with LLM() as llm, pytest.raises(RequestError, match="transcribes nothing"):
        llm.transcribe(np.zeros(100, np.float32))


async def test_pieces_that_come_in_time_give_the_same(folder: Path, samples: NDArray[np.float32]) -> None:
    llm = AsyncLLM.start(QuireConfig.of(model=str(folder), **SETTINGS))
    try:
        await llm.ready()
        transcriber, hearing = llm.transcriber, Hearing()
        assert isinstance(transcriber, WhisperTranscriber)
        assert (transcriber.can_translate, transcriber.has_word_timestamps) == (False, True)

        async def pieces() -> AsyncIterator[NDArray[np.float32]]:
            for piece in np.array_split(samples, 9):
                yield piece

        heard = transcriber.transcribe(pieces(), GREEDY, RequestOptions(), hearing)
        found: list[Segment] = [segment async for segment in heard]
        assert told(found) == EXPECTED
        assert (hearing.language, hearing.num_generation_tokens > 20) == ("en", True)
    finally:
        await llm.shutdown()
