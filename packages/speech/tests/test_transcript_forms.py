"""Subtitles and JSON by the rules of their formats, read by parsers that are written here from those rules."""

from __future__ import annotations

import json
import re

from openai.types.audio import Transcription as OpenAITranscription
from openai.types.audio import TranscriptionVerbose

from quire_speech.results import Segment, Transcription, Word
from quire_speech.transcript_forms import FORMS, verbose_transcript, written

SRT_CUE = re.compile(r"(\d+)\n(\d\d):([0-5]\d):([0-5]\d),(\d{3}) --> (\d\d):([0-5]\d):([0-5]\d),(\d{3})\n((?:.+\n)+)\n")
VTT_CUE = re.compile(r"(\d{2,}):([0-5]\d):([0-5]\d)\.(\d{3}) --> (\d{2,}):([0-5]\d):([0-5]\d)\.(\d{3})\n((?:.+\n)+)\n")


def segment(index: int, start_s: float, end_s: float, text: str, words: tuple[Word, ...] | None = None) -> Segment:
    return Segment(
        index=index,
        seek_s=30.0 * index,
        start_s=start_s,
        end_s=end_s,
        text=text,
        token_ids=(50364, 7, 9),
        temperature=0.2,
        avg_logprob=-0.25,
        compression_ratio=1.5,
        no_speech_prob=0.01,
        words=words,
    )


HELLO = (
    Word(start_s=0.0, end_s=0.5, text=" Hello,", probability=0.9),
    Word(start_s=0.5, end_s=1.2345, text=" you", probability=0.5),
)
SAID = [
    segment(0, 0.0, 1.2345, " Hello, you", HELLO),
    segment(1, 59.9996, 59.9996, " a <b> & c --> d"),
    segment(2, 3599.999, 3723.5, " two\n\n lines"),
    segment(3, 4000.0, 4001.0, "  "),
]
WHOLE = Transcription(
    text="Hello, you", language="en", language_probability=0.98, duration_s=4001.0, segments=tuple(SAID)
)


def seconds(hours: str, minutes: str, whole: str, thousandths: str) -> float:
    return int(hours) * 3600 + int(minutes) * 60 + int(whole) + int(thousandths) / 1000


def test_srt() -> None:
    text = written(WHOLE, "srt")
    cues = SRT_CUE.findall(text)
    assert "".join(match[0] for match in re.finditer(SRT_CUE, text)) == text
    assert [cue[0] for cue in cues] == ["1", "2", "3"]
    times = [(seconds(*cue[1:5]), seconds(*cue[5:9])) for cue in cues]
    assert times == [(0.0, 1.234), (60.0, 60.001), (3599.999, 3723.5)]
    assert [cue[9] for cue in cues] == ["Hello, you\n", "a <b> & c -> d\n", "two\nlines\n"]


def test_vtt() -> None:
    text = written(WHOLE, "vtt")
    assert text.startswith("WEBVTT\n\n")
    cues = VTT_CUE.findall(text.removeprefix("WEBVTT\n\n"))
    assert [cue[8] for cue in cues] == ["Hello, you\n", "a &lt;b&gt; &amp; c -&gt; d\n", "two\nlines\n"]
    assert all(seconds(*cue[:4]) < seconds(*cue[4:8]) for cue in cues)


def test_words_have_times_of_their_own() -> None:
    words = written(WHOLE, "srt", granularities=("word",))
    assert [(cue[9], seconds(*cue[1:5]), seconds(*cue[5:9])) for cue in SRT_CUE.findall(words)] == [
        ("Hello,\n", 0.0, 0.5),
        ("you\n", 0.5, 1.234),
    ]
    cues = VTT_CUE.findall(written(WHOLE, "vtt", granularities=("word",)).removeprefix("WEBVTT\n\n"))
    assert [cue[8] for cue in cues][:2] == ["Hello, <00:00:00.500>you\n", "a &lt;b&gt; &amp; c -&gt; d\n"]
    assert [each["word"] for each in json.loads(written(WHOLE, "json", granularities=("word",)))["words"]] == [
        "Hello,",
        "you",
    ]


def test_silence_is_an_empty_file_of_each_form() -> None:
    silence = Transcription(text="", language="en", language_probability=0.0, duration_s=3.0, segments=())
    files = {form: written(silence, form) for form in FORMS}
    assert files["srt"] == ""
    assert files["vtt"] == "WEBVTT\n\n"
    assert files["text"] == "\n"
    assert json.loads(files["json"]) == {"text": ""}
    assert json.loads(files["verbose_json"])["segments"] == []


def test_json_is_what_openais_client_reads() -> None:
    assert OpenAITranscription.model_validate_json(written(WHOLE, "json"), strict=True).text == "Hello, you"
    both = verbose_transcript(WHOLE, granularities=("word", "segment"))
    read = TranscriptionVerbose.model_validate_json(json.dumps(both), strict=True)
    assert (read.language, read.duration, len(read.segments or ())) == ("en", 4001.0, 4)
    assert [(each.word, each.start, each.end) for each in read.words or ()] == [
        ("Hello,", 0, 0.5),
        ("you", 0.5, 1.2345),
    ]
    assert (read.segments or [])[1].seek == 3000
    assert "segments" not in verbose_transcript(WHOLE, granularities=("word",))
    assert "words" not in verbose_transcript(WHOLE)
