"""Options of a transcription: what is refused, and by which name."""

from __future__ import annotations

from typing import Any

import pytest

from quire_interfaces import RequestError
from quire_speech import TranscriptionOptions


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("task", "summarize"),
        ("language", 7),
        ("prompt", b"x"),
        ("temperatures", ()),
        ("temperatures", (0.0, -1.0)),
        ("temperatures", (float("nan"),)),
        ("beam_size", 0),
        ("beam_size", True),
        ("beam_size", 2.5),
        ("best_of", 65),
        ("patience", 0),
        ("length_penalty", 1.5),
        ("compression_ratio_threshold", 0),
        ("logprob_threshold", 0.1),
        ("no_speech_threshold", 1.1),
        ("word_timestamps", 1),
        ("suppress_tokens", (-1,)),
        ("max_tokens", 0),
        ("max_initial_timestamp_s", 31),
        ("top_p", 0),
        ("min_p", float("inf")),
        ("seed", "1"),
    ],
)
def test_wrong_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as refused:
        TranscriptionOptions(**{field: value})
    assert refused.value.param == field
    assert field in str(refused.value)


def test_words_need_times_of_segments() -> None:
    with pytest.raises(RequestError) as refused:
        TranscriptionOptions(word_timestamps=True, timestamps=False)
    assert (refused.value.param, refused.value.code) == ("word_timestamps", "unsupported_combination")


def test_one_temperature_may_stand_alone() -> None:
    assert TranscriptionOptions(temperatures=0).temperatures == (0.0,)  # type: ignore[arg-type]
