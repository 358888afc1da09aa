"""Windows of a recording: what a network is asked, and what becomes of its answers. The answers are written here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from quire_interfaces import RequestError
from quire_speech import Segment, Transcription, TranscriptionOptions
from quire_speech.languages import LANGUAGES, language_code
from quire_speech.recording import Recording
from quire_speech.segments import split_window
from quire_speech.transcriber import AlignTokens, Decode, Decoded, MoreSound, Probe, Transcriber
from quire_speech.vocabulary import SpeechVocabulary
from quire_speech.words import Alignment

END, START, EN, DE, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH, NO_TIMES = range(300, 309)
FIRST = NO_TIMES + 1


class Letters:
    """Each letter is a token."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, token_ids))


def vocabulary(**changed: Any) -> SpeechVocabulary:
    fields: dict[str, Any] = {
        "end_of_text": END, "start_of_transcript": START, "start_of_previous": PREVIOUS, "no_speech": NO_SPEECH,
        "no_timestamps": NO_TIMES, "languages": {"en": EN, "de": DE},
        "tasks": {"transcribe": TRANSCRIBE, "translate": TRANSLATE}, "suppressed": (7,), "suppressed_at_begin": (32,),
        "max_initial_timestamp": 50, "alignment_heads": (), "vocab_size": 2000, "max_tokens": 448,
    }  # fmt: skip
    return SpeechVocabulary(**fields | changed)


def spoken(text: str, start: float = 0.0, end: float = 2.0) -> list[int]:
    return [FIRST + round(50 * start), *map(ord, text), FIRST + round(50 * end)]


class Network:
    """Answers by a script: what each decoded window says, and how probable it is."""

    def __init__(self, *decoded: tuple[list[int], float], no_speech: float = 0.1, language: int = DE) -> None:
        self.decoded, self.no_speech, self.language = list(decoded), no_speech, language
        self.asked: list[Decode] = []
        self.starts_s: dict[str, tuple[float, ...]] = {}
        """Text -> when its letters, and the end of text, are said."""
        self.aligned: list[AlignTokens] = []

    def run(
        self, seconds: float, options: TranscriptionOptions, *, of: Callable[..., SpeechVocabulary] = vocabulary
    ) -> Transcription:
        samples = (0.1 * np.random.default_rng(0).standard_normal(int(16_000 * seconds))).astype(np.float32)
        recording = Recording(8, 3000)
        pieces = iter([*np.array_split(samples, 7), None])
        steps, answer = Transcriber(recording, of(), Letters(), options).run(), None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            answer = None
            if isinstance(step, MoreSound):
                piece = next(pieces)
                recording.finish() if piece is None else recording.add(piece)
            elif isinstance(step, Probe):
                answer = dict.fromkeys(step.token_ids, -9.0)
                answer |= {self.language: -0.1, NO_SPEECH: float(np.log(self.no_speech))}
            elif isinstance(step, Decode):
                self.asked.append(step)
                token_ids, logprob = self.decoded.pop(0)
                answer = Decoded(tuple(token_ids), logprob * (len(token_ids) + 1))
            elif isinstance(step, AlignTokens):
                self.aligned.append(step)
                answer = Alignment(self.starts_s["".join(map(chr, step.text_ids))], (0.5,) * len(step.text_ids))
            else:
                assert isinstance(step, Segment)


def test_windows_follow_each_other_and_are_read_by_the_next() -> None:
    network = Network((spoken(" one", 1, 3) + spoken(" two", 3, 20) + [FIRST + 1000], -0.1), (spoken(" three"), -0.1))
    found = network.run(50, TranscriptionOptions(prompt="Names"))
    assert found.text == "one two three"
    assert (found.language, found.duration_s) == ("de", 50)
    assert found.language_probability > 0.99
    assert [(each.start_s, each.end_s) for each in found.segments] == [(1, 3), (3, 20), (20, 22)]
    first, second = network.asked
    assert first.prompt == (PREVIOUS, *map(ord, " Names"), START, DE, TRANSCRIBE)
    assert second.prompt == (
        PREVIOUS, *map(ord, " Names"), *spoken(" one", 1, 3), *spoken(" two", 3, 20), START, DE, TRANSCRIBE
    )  # fmt: skip
    assert second.rules["begin"] == len(second.prompt)


def test_long_histories_are_cut_and_hotwords_stay() -> None:
    network = Network((spoken(" a", 0, 30), -0.1))
    network.run(20, TranscriptionOptions(prompt="x" * 500, hotwords="Quire", language="en", task="translate"))
    (asked,) = network.asked
    assert asked.prompt[:8] == (PREVIOUS, *map(ord, " Quire"), ord("x"))
    assert asked.prompt[-3:] == (START, EN, TRANSLATE)
    assert len(asked.prompt) == 1 + 6 + 223 + 3
    assert asked.max_tokens == 448 - len(asked.prompt)


def test_repetitive_and_improbable_windows_are_tried_again() -> None:
    repeated = spoken(" na" * 60, 0, 20)
    network = Network((repeated, -0.1), (spoken(" so", 0, 20), -2.0), (spoken(" so it is", 0, 20), -0.3))
    (segment,) = network.run(20, TranscriptionOptions(language="en", temperatures=(0.0, 0.4, 0.8))).segments
    assert [each.temperature for each in network.asked] == [0.0, 0.4, 0.8]
    assert (segment.text, segment.temperature) == (" so it is", 0.8)
    assert segment.avg_logprob == pytest.approx(-0.3)


def test_of_failed_attempts_the_most_probable_one_that_does_not_repeat_itself_counts() -> None:
    repeated = spoken(" na" * 60, 0, 20)
    network = Network((repeated, -0.1), (spoken(" b", 0, 20), -2.0), (spoken(" c", 0, 20), -1.5))
    (segment,) = network.run(20, TranscriptionOptions(language="en", temperatures=(0.0, 0.2, 0.4))).segments
    assert (segment.text, segment.temperature) == (" c", 0.4)


def test_hot_windows_are_not_read_by_the_next() -> None:
    network = Network((spoken(" a", 0, 30), -2.0), (spoken(" b", 0, 30), -0.1), (spoken(" c"), -0.1))
    network.run(45, TranscriptionOptions(language="en", temperatures=(0.0, 0.8)))
    assert network.asked[-1].prompt == (START, EN, TRANSCRIBE)


@pytest.mark.parametrize(("logprob", "texts"), [(-1.5, []), (-0.5, [" you"])])
def test_improbable_text_in_silence_is_nothing(logprob: float, texts: list[str]) -> None:
    network = Network((spoken(" you", 0, 30), logprob), no_speech=0.9)
    found = network.run(20, TranscriptionOptions(language="en"))
    assert [each.text for each in found.segments] == texts
    assert len(network.asked) == 1


def test_silence_asks_nothing() -> None:
    recording = Recording.of(np.zeros(16_000 * 70, np.float32), 8, 3000)
    steps = Transcriber(recording, vocabulary(), Letters(), TranscriptionOptions()).run()
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert (end.value.value.text, end.value.value.segments) == ("", ())


@pytest.mark.parametrize(
    ("tokens", "pieces", "used"),
    [
        ([FIRST, 65, FIRST + 100], [(0.0, 2.0)], 3000),
        ([FIRST + 5, 65, FIRST + 100, FIRST + 150, 66], [(0.1, 2.0)], 200),
        ([FIRST, 65, FIRST + 100, FIRST + 150, 66, FIRST + 200], [(0.0, 2.0), (3.0, 4.0)], 3000),
        ([65, 66], [(0.0, 30.0)], 3000),
        ([FIRST, 65, 66], [(0.0, 30.0)], 3000),
    ],
)
def test_times_make_segments(tokens: list[int], pieces: list[tuple[float, float]], used: int) -> None:
    found, done = split_window(tokens, 3000, FIRST)
    assert [(each.start_s, each.end_s) for each in found] == [tuple(map(pytest.approx, each)) for each in pieces]
    assert done.num_frames == used


def with_heads() -> SpeechVocabulary:
    return vocabulary(alignment_heads=((0, 1),))


def test_words_are_told_by_the_alignment_of_the_text_alone() -> None:
    network = Network(([*spoken(" a-b", 1, 3), *spoken(" c!", 3, 5)], -0.1))
    network.starts_s[" a-b c!"] = (1.0, 1.0, 1.4, 1.6, 3.0, 3.2, 4.0, 4.1)
    found = network.run(20, TranscriptionOptions(language="en", word_timestamps=True), of=with_heads)
    (asked,) = network.aligned
    assert (asked.prompt, asked.num_frames) == ((START, EN, TRANSCRIBE, NO_TIMES), 2000)
    first, second = found.segments
    assert [(each.text, each.start_s, each.end_s) for each in first.words or ()] == [(" a", 1.0, 1.4), ("-b", 1.4, 3.0)]
    assert [(each.text, each.start_s, each.end_s) for each in second.words or ()] == [(" c!", 3.0, 4.0)]
    assert (first.start_s, first.end_s, second.start_s, second.end_s) == (1.0, 3.0, 3.0, 4.0)


def test_what_a_model_does_not_know_is_refused_by_name() -> None:
    def english() -> SpeechVocabulary:
        return vocabulary(languages={}, tasks={})

    for options, param in (
        (TranscriptionOptions(language="de"), "language"),
        (TranscriptionOptions(task="translate"), "task"),
        (TranscriptionOptions(word_timestamps=True), "word_timestamps"),
    ):
        with pytest.raises(RequestError) as refused:
            Network().run(1, options, of=english)
        assert refused.value.param == param
    with pytest.raises(RequestError, match=r"fr.*it knows de, en"):
        Network().run(1, TranscriptionOptions(language="French"))


def test_languages_have_codes_and_names() -> None:
    assert len(LANGUAGES) == 100
    assert [language_code(each) for each in ("EN", "german", "pt-BR", "Castilian")] == ["en", "de", "pt", "es"]
    with pytest.raises(RequestError) as refused:
        language_code("klingon")
    assert refused.value.param == "language"
