"""A window's tokens as segments: times stand in pairs between them (Radford et al. 2022, sec. 2.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from quire_speech.features import FRAMES_PER_S
from quire_speech.results import TokenLogprob, Word
from quire_speech.vocabulary import SECONDS_PER_TIMESTAMP

__all__ = ["Piece", "Timed", "Used", "split_window"]

_FRAMES_PER_TIMESTAMP = round(SECONDS_PER_TIMESTAMP * FRAMES_PER_S)


class Piece(NamedTuple):
    """A segment, in seconds from the window's beginning."""

    start_s: float
    end_s: float
    token_ids: tuple[int, ...]
    first: int
    """Place of the first of them among the window's tokens."""


class Used(NamedTuple):
    """How much of a window was transcribed."""

    num_frames: int
    ends_in_silence: bool
    """The model wrote one time at the end: there is no speech behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A segment of a recording before its text is written; fields as of `Segment`."""

    seek_s: float
    start_s: float
    end_s: float
    token_ids: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: tuple[Word, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None


def split_window(
    token_ids: Sequence[int], num_frames: int, timestamp_begin: int, *, has_times: bool = True
) -> tuple[list[Piece], Used]:
    """The segments of a window, and what of it is done: all, or what stands before the last pair of times.

    Args:
        token_ids: Text and times.
        num_frames: Frames of the window that are sound.
        timestamp_begin: Token of the time 0; all tokens from here on are times.
        has_times: False for a transcript without times, which is one segment.
    """
    tokens = list(token_ids)
    is_time = [token >= timestamp_begin for token in tokens] if has_times else [False] * len(tokens)
    ends = [place for place in range(1, len(tokens)) if is_time[place] and is_time[place - 1]]
    ends_in_silence = len(tokens) >= 2 and is_time[-1] and not is_time[-2]

    def seconds(token: int) -> float:
        return (token - timestamp_begin) * SECONDS_PER_TIMESTAMP

    if not ends:
        end_s = num_frames / FRAMES_PER_S
        times = [token for token, each in zip(tokens, is_time, strict=True) if each]
        if times and times[-1] != timestamp_begin:
            end_s = seconds(times[-1])
        return [Piece(0.0, end_s, tuple(tokens), 0)], Used(num_frames, ends_in_silence)
    borders = [0, *ends, *([len(tokens)] if ends_in_silence else [])]
    pieces = []
    for begin, end in pairwise(borders):
        own = tokens[begin:end]
        pieces.append(Piece(seconds(own[0]), seconds(own[-1]), tuple(own), begin))
    if ends_in_silence:
        return pieces, Used(num_frames, True)
    return pieces, Used((tokens[ends[-1] - 1] - timestamp_begin) * _FRAMES_PER_TIMESTAMP, False)
