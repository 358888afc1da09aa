"""Times of words, from which frames a decoder looked at while it wrote their tokens (Radford et al. 2022, and OpenAI's
Whisper since 2023): a path through the attention of some heads by dynamic time warping.

Shape legend: T tokens, F frames of the encoder's output.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from quire_speech.results import Word
from quire_speech.segments import Timed
from quire_speech.vocabulary import SECONDS_PER_TIMESTAMP

__all__ = ["Alignment", "WordTimes", "align", "warp"]

_LONGEST_MEDIAN_S = 0.7
_SENTENCE_ENDS = frozenset(".。!！?？")
_BEFORE = "\"'“¿([{-"
"""Punctuation that belongs to the word behind it."""
_BEHIND = "\"'.。,，!！?？:：”)]}、"
"""Punctuation that belongs to the word before it."""
_WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages whose words are not told apart: each character is one."""
_REPLACEMENT = "�"


@dataclass(frozen=True, slots=True, eq=False)
class Alignment:
    """When the tokens of a text, and the end of text behind them, are said."""

    starts_s: tuple[float, ...]
    """Of each token, and of the end of text: seconds from the window's beginning."""
    probabilities: tuple[float, ...]
    """Of each token."""


def align(data: bytes, shape: Sequence[int]) -> Alignment:
    """When the tokens of a text are said.

    Args:
        data: float32 [T + 1, F + 1] of T tokens of the text and the end behind it: how much the heads that follow what
            is said attend to each of F frames where they write the token, standardized over tokens, smoothed, averaged;
            the last column is the probability of the token.
        shape: The two numbers.
    """
    matrix = np.frombuffer(data, np.float32).reshape(shape)
    tokens, frames = warp(-matrix[:, :-1].astype(np.float64))
    begins = np.flatnonzero(np.diff(tokens, prepend=-1))
    starts = frames[begins] * SECONDS_PER_TIMESTAMP
    return Alignment(tuple(starts.tolist()), tuple(matrix[:-1, -1].tolist()))


def warp(costs: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The cheapest path through costs [T, F] from the first corner to the last one, by steps of one token, one frame,
    or both (Sakoe & Chiba 1978): its tokens and its frames."""
    num_tokens, num_frames = costs.shape
    total = np.full((num_tokens + 1, num_frames + 1), np.inf)
    total[0, 0] = 0
    came = np.zeros((num_tokens + 1, num_frames + 1), np.int8)
    # Cells of one diagonal depend on the two diagonals before them alone.
    for diagonal in range(2, num_tokens + num_frames + 1):
        token = np.arange(max(1, diagonal - num_frames), min(num_tokens, diagonal - 1) + 1)
        frame = diagonal - token
        both, down, right = total[token - 1, frame - 1], total[token - 1, frame], total[token, frame - 1]
        step = np.where((both < down) & (both < right), 0, np.where((down < both) & (down < right), 1, 2))
        total[token, frame] = costs[token - 1, frame - 1] + np.choose(step, (both, down, right))
        came[token, frame] = step
    came[0, :], came[:, 0] = 2, 1
    token_index, frame_index, path = num_tokens, num_frames, []
    while token_index > 0 or frame_index > 0:
        path.append((token_index - 1, frame_index - 1))
        step_taken = came[token_index, frame_index]
        token_index -= step_taken != 2
        frame_index -= step_taken != 1
    tokens, frames = np.array(path[::-1], dtype=np.int64).T
    return tokens, frames


@dataclass(slots=True)
class _Timing:
    """A word while its times are put right."""

    text: str
    token_ids: list[int]
    start_s: float
    end_s: float
    probability: float


class WordTimes:
    """Words of the segments of one recording, window by window.

    Args:
        decode: Token ids -> text.
        end_of_text: All tokens below are text.
        timestamp_begin: Token of the time 0.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], end_of_text: int, timestamp_begin: int) -> None:
        self._decode, self._end_of_text, self._timestamp_begin = decode, end_of_text, timestamp_begin
        self._last_speech_s = 0.0

    def add(self, segments: Sequence[Timed], alignment: Alignment, language: str) -> list[Timed]:
        """The segments of a window with their words, whose times are theirs where these are more plausible."""
        token_ids = [token for each in segments for token in each.token_ids if token < self._end_of_text]
        words = self._words(token_ids, alignment, language)
        lengths = np.array([each.end_s - each.start_s for each in words])
        lengths = lengths[lengths.nonzero()]
        median_s = min(_LONGEST_MEDIAN_S, float(np.median(lengths)) if len(lengths) else 0.0)
        if len(lengths):
            _shorten_at_sentences(words, 2 * median_s)
        _merge_punctuation(words)
        found, place = [], 0
        for segment in segments:
            wanted = sum(token < self._end_of_text for token in segment.token_ids)
            own: list[_Timing] = []
            while place < len(words) and wanted > 0:
                wanted -= len(words[place].token_ids)
                if words[place].text:
                    own.append(_moved(words[place], segment.seek_s))
                place += 1
            found.append(self._fitted(segment, own, median_s))
        return found

    def last_end_s(self, segments: Sequence[Timed]) -> float | None:
        """Where the last word of a window ends; None without words."""
        return next((each.words[-1].end_s for each in reversed(segments) if each.words), None)

    def _words(self, token_ids: list[int], alignment: Alignment, language: str) -> list[_Timing]:
        groups = self._by_character(token_ids)
        if language not in _WITHOUT_SPACES:
            groups = _by_space(groups)
        words, place = [], 0
        for text, ids in groups:
            end = place + len(ids)
            starts = alignment.starts_s
            probability = float(np.mean(alignment.probabilities[place:end]))
            words.append(_Timing(text, ids, starts[place], starts[min(end, len(starts) - 1)], probability))
            place = end
        return words

    def _by_character(self, token_ids: list[int]) -> list[tuple[str, list[int]]]:
        """The fewest tokens that are whole characters, one group after the other."""
        whole = self._decode(token_ids)
        groups: list[tuple[str, list[int]]] = []
        own: list[int] = []
        offset = 0
        for token in token_ids:
            own.append(token)
            text = self._decode(own)
            broken = text.find(_REPLACEMENT)
            if broken < 0 or (offset + broken < len(whole) and whole[offset + broken] == _REPLACEMENT):
                groups.append((text, own))
                offset += len(text)
                own = []
        if own and groups:
            groups[-1][1].extend(own)
        elif own:
            groups.append((self._decode(own), own))
        return groups

    def _fitted(self, segment: Timed, words: list[_Timing], median_s: float) -> Timed:
        """A segment with its words, the first and the last of which are not longer than is plausible."""
        if not words:
            return segment
        first, last, most = words[0], words[-1], 2 * median_s
        start_s, end_s = segment.start_s, segment.end_s
        is_long = first.end_s - first.start_s > most or (len(words) > 1 and words[1].end_s - first.start_s > 2 * most)
        if first.end_s - self._last_speech_s > 4 * median_s and is_long:
            if len(words) > 1 and words[1].end_s - words[1].start_s > most:
                border = max(words[1].end_s / 2, words[1].end_s - most)
                first.end_s = words[1].start_s = border
            first.start_s = max(0.0, first.end_s - most)
        if start_s < first.end_s and start_s - 0.5 > first.start_s:
            first.start_s = max(0.0, min(first.end_s - median_s, start_s))
        else:
            start_s = first.start_s
        if end_s > last.start_s and end_s + 0.5 < last.end_s:
            last.end_s = max(last.start_s + median_s, end_s)
        else:
            end_s = last.end_s
        self._last_speech_s = end_s
        found = tuple(
            Word(start_s=each.start_s, end_s=each.end_s, text=each.text, probability=each.probability) for each in words
        )
        return replace(segment, start_s=start_s, end_s=end_s, words=found)


def _moved(word: _Timing, offset_s: float) -> _Timing:
    return replace(word, start_s=round(offset_s + word.start_s, 2), end_s=round(offset_s + word.end_s, 2))


def _by_space(groups: list[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
    """Groups of tokens as words, which begin with a space, or are punctuation."""
    words: list[tuple[str, list[int]]] = []
    for text, ids in groups:
        if text.startswith(" ") or text.strip() in string.punctuation or not words:
            words.append((text, ids))
        else:
            words[-1] = (words[-1][0] + text, words[-1][1] + ids)
    return words


def _shorten_at_sentences(words: list[_Timing], most_s: float) -> None:
    """No pause between sentences is part of a word."""
    for before, word in pairwise(words):
        if word.end_s - word.start_s > most_s:
            if word.text in _SENTENCE_ENDS:
                word.end_s = word.start_s + most_s
            elif before.text in _SENTENCE_ENDS:
                word.start_s = word.end_s - most_s


def _merge_punctuation(words: list[_Timing]) -> None:
    """Punctuation becomes part of the word that it belongs to; what is left of it is empty."""
    following = len(words) - 1
    for place in range(len(words) - 2, -1, -1):
        word, behind = words[place], words[following]
        if word.text.startswith(" ") and word.text.strip() and word.text.strip() in _BEFORE:
            behind.text, behind.token_ids = word.text + behind.text, word.token_ids + behind.token_ids
            word.text, word.token_ids = "", []
        else:
            following = place
    previous = 0
    for place in range(1, len(words)):
        before, word = words[previous], words[place]
        if word.text and not before.text.endswith(" ") and word.text in _BEHIND:
            before.text, before.token_ids = before.text + word.text, before.token_ids + word.token_ids
            word.text, word.token_ids = "", []
        else:
            previous = place
