"""Segments as subtitles: SubRip (.srt) and WebVTT (.vtt, W3C). Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from quire_speech.results import Segment

__all__ = ["TimedText", "srt", "srt_cue", "vtt", "vtt_cue", "vtt_words"]

_LEAST_MS = 1
"""A cue ends behind its beginning."""


class TimedText(Protocol):
    """What a subtitle is made of: a `Segment` or a `Word`."""

    @property
    def start_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...
    @property
    def text(self) -> str: ...


def srt(segments: Iterable[TimedText]) -> str:
    """All segments with text as one SubRip file; empty without any."""
    said = (each for each in segments if each.text.strip())
    return "".join(srt_cue(number, each) for number, each in enumerate(said, 1))


def srt_cue(number: int, segment: TimedText) -> str:
    """One subtitle, with the blank line behind it.

    Args:
        number: From 1.
        segment: Its times and its text, whose blank lines, which would end the cue, are left out.
    """
    start, end = _times(segment, ",")
    return f"{number}\n{start} --> {end}\n{_one_paragraph(segment.text)}\n\n"


def vtt(segments: Iterable[Segment], cue: Callable[[Segment], str]) -> str:
    """All segments with text as one WebVTT file, its header alone without any; `cue` writes one of them."""
    return "WEBVTT\n\n" + "".join(cue(each) for each in segments if each.text.strip())


def vtt_cue(segment: TimedText) -> str:
    """One subtitle, with the blank line behind it. What would be markup in its text is escaped."""
    start, end = _times(segment, ".")
    return f"{start} --> {end}\n{_escaped(_one_paragraph(segment.text))}\n\n"


def vtt_words(segment: Segment) -> str:
    """One subtitle with the time of each word in its text, where players highlight it from (W3C, WebVTT, cue
    timestamps); as `vtt_cue` where the segment has no words."""
    text = _one_paragraph(segment.text)
    told, end_ms = max(0, round(segment.start_s * 1000)), round(segment.end_s * 1000)
    parts, place = list[str](), 0
    for word in segment.words or ():
        at, found = round(word.start_s * 1000), text.find(word.text.strip(), place)
        if found < 0 or not told < at < end_ms:
            continue
        parts += [_escaped(text[place:found]), f"<{_time(at, '.')}>"]
        place, told = found, at
    start, end = _times(segment, ".")
    return f"{start} --> {end}\n{''.join(parts)}{_escaped(text[place:])}\n\n"


def _times(segment: TimedText, point: str) -> tuple[str, str]:
    start = max(0, round(segment.start_s * 1000))
    end = max(round(segment.end_s * 1000), start + _LEAST_MS)
    return _time(start, point), _time(end, point)


def _time(milliseconds: int, point: str) -> str:
    seconds, milliseconds = divmod(milliseconds, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{seconds:02}{point}{milliseconds:03}"


def _escaped(text: str) -> str:
    """As the text of a WebVTT cue."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _one_paragraph(text: str) -> str:
    """The text without blank lines and without the arrow that only times may have."""
    return "\n".join(line.strip() for line in text.replace("-->", "->").splitlines() if line.strip())
