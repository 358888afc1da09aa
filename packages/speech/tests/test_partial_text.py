"""The text of a window while it is written: what is told of it stays, unless the window is heard again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quire_speech import PartialText, TranscriptionOptions
from quire_speech.partial_text import Telling

END, FIRST = 300, 310
PIECES = [b" The", b" riv", b"er", b" is", b" \xc3", b"\xa9", b" na"]


def decode(token_ids: Sequence[int]) -> str:
    return b"".join(PIECES[each] for each in token_ids).decode(errors="replace")


def told(telling: Telling, token_ids: Sequence[int], logprob: float = -0.1) -> list[str]:
    partial = PartialText(decode, telling, TranscriptionOptions(), END, FIRST)
    return [partial.add([token], logprob * (place + 1)) for place, token in enumerate(token_ids)]


@pytest.mark.parametrize(
    ("telling", "expected"),
    [
        ("tokens", ["", " The", " riv", "er", "", "", " is", "", " é", ""]),
        ("segments", ["", "", "", "", " The river", "", "", "", "", " is é"]),
        ("nothing", [""] * 10),
    ],
)
def test_whole_characters_of_what_will_stay(telling: Telling, expected: list[str]) -> None:
    assert told(telling, [FIRST, 0, 1, 2, FIRST + 50, FIRST + 50, 3, 4, 5, FIRST + 80]) == expected


def test_what_may_be_heard_again_is_not_told() -> None:
    assert set(told("tokens", [FIRST, 0, 1, 2], logprob=-1.5)) == {""}
    repeated = told("tokens", [FIRST, 0, *[6] * 200])
    assert repeated[1] == " The"
    assert set(repeated[100:]) == {""}


def test_improbable_beginnings_are_told_later() -> None:
    partial = PartialText(decode, "tokens", TranscriptionOptions(), END, FIRST)
    assert partial.add([FIRST, 0], -3.0) == ""
    assert partial.add([1, 2], -3.2) == " The river"
    assert partial.num_told == 3
