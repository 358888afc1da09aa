"""Times of words: paths through attention by every path that there is, words and punctuation, pauses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from quire_speech.segments import Timed
from quire_speech.words import Alignment, WordTimes, align, warp

END, FIRST = 300, 310


def cheapest(costs: np.ndarray) -> float:
    """Cost of the cheapest path, by trying all of them."""
    num_tokens, num_frames = costs.shape

    @cache
    def from_here(token: int, frame: int) -> float:
        own = float(costs[token, frame])
        if (token, frame) == (num_tokens - 1, num_frames - 1):
            return own
        nexts = [(token + 1, frame), (token, frame + 1), (token + 1, frame + 1)]
        return own + min(from_here(*each) for each in nexts if each[0] < num_tokens and each[1] < num_frames)

    return from_here(0, 0)


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 1), (4, 9), (9, 4), (8, 8)])
def test_the_path_is_the_cheapest_one(shape: tuple[int, int]) -> None:
    costs = np.random.default_rng(shape[0]).standard_normal(shape)
    tokens, frames = warp(costs)
    assert (tokens[0], frames[0], tokens[-1], frames[-1]) == (0, 0, shape[0] - 1, shape[1] - 1)
    steps = set(zip(np.diff(tokens).tolist(), np.diff(frames).tolist(), strict=True))
    assert steps <= {(0, 1), (1, 0), (1, 1)}
    assert costs[tokens, frames].sum() == pytest.approx(cheapest(costs))


def test_tokens_are_said_where_they_are_attended_to() -> None:
    weights = np.full((4, 51), -1, np.float32)
    for token, frames in enumerate((range(10), range(10, 25), range(25, 30), range(30, 50))):
        weights[token, frames] = 3.0
    weights[:3, -1] = (0.5, 0.25, 0.75)
    found = align(weights.tobytes(), weights.shape)
    assert found.starts_s == pytest.approx((0.0, 0.2, 0.5, 0.6))
    assert found.probabilities == (0.5, 0.25, 0.75)


def words_of(
    pieces: Sequence[bytes], starts_s: Sequence[float], language: str = "en"
) -> list[tuple[str, float, float]]:
    """Words of a segment whose tokens are these pieces of text."""

    def decode(token_ids: Sequence[int]) -> str:
        return b"".join(pieces[each] for each in token_ids).decode(errors="replace")

    token_ids, end_s = tuple(range(len(pieces))), starts_s[-1]
    assert len(starts_s) == len(pieces) + 1
    segment = Timed(
        seek_s=0.0, start_s=0.0, end_s=end_s, token_ids=(FIRST, *token_ids, FIRST + round(50 * end_s)),
        temperature=0.0, avg_logprob=-0.1, compression_ratio=1.0, no_speech_prob=0.0,
    )  # fmt: skip
    alignment = Alignment(tuple(starts_s), (0.5,) * len(pieces))
    (found,) = WordTimes(decode, END, FIRST).add([segment], alignment, language)
    assert "".join(each.text for each in found.words) == decode(token_ids)
    return [(each.text, each.start_s, each.end_s) for each in found.words]


def steps(count: int) -> list[float]:
    return [round(0.1 * place, 2) for place in range(count + 1)]


def test_punctuation_belongs_to_words() -> None:
    pieces = [b' "', b"a", b" b", b",", b'"', b" (", b"c", b")"]
    assert [each[0] for each in words_of(pieces, steps(8))] == [' "a', ' b,"', " (c)"]


def test_characters_of_several_tokens_and_languages_without_spaces() -> None:
    pieces = [bytes([each]) for each in "日本".encode()]
    assert words_of(pieces, steps(6), "ja") == [("日", 0.0, 0.3), ("本", 0.3, 0.6)]
    assert words_of(pieces, steps(6), "en") == [("日本", 0.0, 0.6)]


def test_pauses_are_not_part_of_words() -> None:
    # The first word begins 5 s before it is said, and the pause behind the sentence is 4 s long.
    pieces = [b" ab", b" cd", b".", b" ef", b" gh", b" ij"]
    first, second, third, *_ = words_of(pieces, (0.0, 5.4, 5.8, 9.8, 10.2, 10.5, 10.9))
    assert first == (" ab", pytest.approx(4.6), 5.4)  # twice the median length of a word
    assert second == (" cd.", 5.4, 5.8)
    assert third == (" ef", 9.8, 10.2)
