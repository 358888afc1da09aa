"""Filter banks beside their definitions, bin by bin in float64, and beside a few numbers of torchaudio 2.11."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from multimodal_samples import tone
from numpy.typing import NDArray

from quire_multimodal import filter_banks
from quire_multimodal.filter_banks import (
    granite_speech_features,
    kaldi_filter_bank,
    stacked_frames,
    whisper_features,
)

RATE = 16_000
SAMPLES = np.asarray(tone(0.12), np.float32) + np.random.default_rng(0).normal(0, 0.05, 1920).astype(np.float32)


def powers(frame: NDArray[np.float64], num_fft: int) -> NDArray[np.float64]:
    """|X_k|^2 by the sum that defines it."""
    places = np.arange(len(frame))
    turns = np.outer(np.arange(num_fft // 2 + 1), places) * (2 * math.pi / num_fft)
    return (np.cos(turns) @ frame) ** 2 + (np.sin(turns) @ frame) ** 2


def weight(place: float, low: float, middle: float, high: float) -> float:
    """Of a triangle."""
    return max(0.0, min((place - low) / (middle - low), (high - place) / (high - middle)))


def granite_reference(samples: NDArray[np.float32], num_mel_bins: int) -> NDArray[np.float64]:
    """Frames of 512 around every 160th sample, 400 of them through Hann's window; HTK's mels; logarithms in a range of
    8, (x + 4) / 4, by twos."""
    mirrored = np.concatenate([samples[256:0:-1], samples, samples[-2:-258:-1]]).astype(np.float64)
    window = [0.5 - 0.5 * math.cos(2 * math.pi * i / 400) for i in range(400)]
    top = 2595 * math.log10(1 + 8000 / 700)
    corners = [700 * (10 ** (top * i / (num_mel_bins + 1) / 2595) - 1) for i in range(num_mel_bins + 2)]
    rows = []
    for start in range(0, len(mirrored) - 512 + 1, 160):
        frame = np.zeros(512)
        frame[56:456] = mirrored[start + 56 : start + 456] * window
        power = powers(frame, 512)
        rows.append(
            [
                math.log10(max(1e-10, sum(power[k] * weight(k * RATE / 512, *corners[m : m + 3]) for k in range(257))))
                for m in range(num_mel_bins)
            ]
        )
    logs = np.array(rows)
    scaled = (np.maximum(logs, logs.max() - 8) + 4) / 4
    return scaled[: len(scaled) // 2 * 2].reshape(-1, 2 * num_mel_bins)


def kaldi_reference(samples: NDArray[np.float32], num_mel_bins: int) -> NDArray[np.float64]:
    """Whole frames of 400 without their mean, pre-emphasized, through Hamming's window, to 512; triangles over mels."""
    window = [0.54 - 0.46 * math.cos(2 * math.pi * i / 399) for i in range(400)]
    low, top = (1127 * math.log(1 + hertz / 700) for hertz in (20, 8000))
    corners = [low + (top - low) * i / (num_mel_bins + 1) for i in range(num_mel_bins + 2)]
    rows = []
    for start in range(0, len(samples) - 400 + 1, 160):
        frame = samples[start : start + 400].astype(np.float64)
        frame = frame - frame.mean()
        frame = np.array([frame[i] - 0.97 * frame[max(0, i - 1)] for i in range(400)]) * window
        power = powers(frame, 512)
        mels = [1127 * math.log(1 + k * RATE / 512 / 700) for k in range(256)]
        rows.append(
            [
                math.log(max(2**-23, sum(power[k] * weight(mels[k], *corners[m : m + 3]) for k in range(256))))
                for m in range(num_mel_bins)
            ]
        )
    return np.array(rows)


@pytest.mark.parametrize("num_mel_bins", [80, 23])
@pytest.mark.parametrize(
    ("ours", "reference"), [(granite_speech_features, granite_reference), (kaldi_filter_bank, kaldi_reference)]
)
def test_filter_banks_are_what_they_are_defined_as(
    ours: Callable[..., NDArray[np.float32]], reference: Callable[..., NDArray[np.float64]], num_mel_bins: int
) -> None:
    expected = reference(SAMPLES, num_mel_bins)
    found = ours(SAMPLES, num_mel_bins=num_mel_bins)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loudest", [1.5, None])
def test_features_of_whisper_are_those_of_transformers(loudest: float | None) -> None:
    from transformers import audio_utils

    filters = audio_utils.mel_filter_bank(201, 128, 0.0, 8000.0, RATE, norm="slaney", mel_scale="slaney")
    logs = audio_utils.spectrogram(
        SAMPLES.astype(np.float64),
        audio_utils.window_function(400, "hann"),
        400,
        160,
        power=2.0,
        mel_filters=filters,
        log_mel="log10",
        dtype=np.float64,
    )[:, : len(SAMPLES) // 160]
    expected = (np.maximum(logs, (logs.max() if loudest is None else loudest) - 8) + 4) / 4
    found = whisper_features(SAMPLES, loudest=loudest)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ours", [granite_speech_features, kaldi_filter_bank, whisper_features])
def test_long_recordings_are_computed_piece_by_piece(
    ours: Callable[..., NDArray[np.float32]], monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = np.concatenate([SAMPLES * scale for scale in (1e-5, 1, 1e-3)])
    whole = ours(samples)
    monkeypatch.setattr(filter_banks, "_BLOCK", 5)
    np.testing.assert_allclose(ours(samples), whole, rtol=1e-6, atol=1e-6)
    monkeypatch.undo()
    minutes = np.random.default_rng(1).normal(0, 0.1, 5 * 60 * RATE).astype(np.float32)
    tracemalloc.start()
    found = ours(minutes)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < found.nbytes + minutes.nbytes + 100e6


def test_frames_at_a_low_rate() -> None:
    frames = np.arange(10, dtype=np.float32)[:, None]
    assert stacked_frames(frames, 7, 6).tolist() == [[0, 0, 0, 0, 1, 2, 3], [3, 4, 5, 6, 7, 8, 9]]
    assert stacked_frames(frames[:7], 7, 6).tolist() == [[0, 0, 0, 0, 1, 2, 3], [3, 4, 5, 6, 6, 6, 6]]
    assert stacked_frames(frames[:1], 7, 6).tolist() == [[0] * 7]


def test_windows_that_are_not_known_are_refused() -> None:
    with pytest.raises(ValueError, match="'blackman'"):
        kaldi_filter_bank(SAMPLES, window="blackman")
