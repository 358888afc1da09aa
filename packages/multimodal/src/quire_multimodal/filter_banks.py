"""Samples -> logarithms of the power in mel bins, as networks were trained on them: Granite Speech's, Fun-ASR's and
Voxtral Realtime's.

Both come from torchaudio there: `transforms.MelSpectrogram` (O'Shaughnessy's mel scale, as in HTK), and
`compliance.kaldi.fbank` (Kaldi's features, Povey et al. 2011). Voxtral Realtime has Whisper's (Slaney's mel scale) with
a loudest bin that is known before the sound has ended. Here all are numpy, in float64 up to the result.

Shape legend: S samples, F frames, M mel bins, B frequencies of a frame.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["granite_speech_features", "kaldi_filter_bank", "stacked_frames", "whisper_features"]

_HTK_SCALE = 2595 / np.log(10)
_KALDI_SCALE = 1127.0
_MEL_CORNER_HZ = 700.0
_LOWEST_KALDI_HZ = 20.0
_SLANEY_CORNER, _SLANEY_CORNER_HZ, _SLANEY_TOP_HZ = 15.0, 1000.0, 8000.0
_SLANEY_STEP = float(np.log(6.4)) / 27
"""Logarithm of the ratio of two frequencies that are one mel apart, above the corner."""
_PREEMPHASIS = 0.97
_FLOAT32_EPSILON = float(np.finfo(np.float32).eps)
"""Kaldi's least power of a mel bin."""
_FLOOR = 1e-10
_RANGE = 8.0
"""Powers of ten between the loudest bin and the least that is told from silence."""
_BLOCK = 4096
"""Frames that are computed at a time: in float64 they take 50 MB, an hour of sound would take gigabytes."""


def granite_speech_features(
    samples: NDArray[np.float32],
    *,
    rate: int = 16_000,
    num_mel_bins: int = 80,
    num_fft: int = 512,
    frame_len: int = 400,
    hop_len: int = 160,
) -> NDArray[np.float32]:
    """What Granite Speech's encoder reads: samples [S] -> [F // 2, 2 * M] float32, two frames in a row.

    Frames stand around every `hop_len`th sample, from the first; before the first sample and behind the last one stand
    their mirrored neighbours.

    Args:
        samples: -1 to 1, more than `num_fft // 2`.
        rate: Samples in a second.
        num_mel_bins: M.
        num_fft: Samples that are transformed, those around a frame counted with weight 0.
        frame_len: Samples of a frame.
        hop_len: Samples between the middles of two frames.
    """
    half = num_fft // 2
    mirrored = np.pad(samples, half, mode="reflect")
    before = (num_fft - frame_len) // 2
    window = np.zeros(num_fft)
    window[before : before + frame_len] = np.hanning(frame_len + 1)[:-1]
    frames = np.lib.stride_tricks.sliding_window_view(mirrored, num_fft)[::hop_len]
    filters, highest = _htk_filters(rate, num_mel_bins, num_fft), -np.inf
    features = np.empty((len(frames), num_mel_bins), np.float32)
    for start in range(0, len(frames), _BLOCK):
        power = _powers(frames[start : start + _BLOCK] * window, num_fft) @ filters
        logs = np.log10(np.maximum(power, _FLOOR))
        highest = max(highest, logs.max())
        features[start : start + _BLOCK] = _scaled(logs)
    np.maximum(features, np.float32(_scaled(highest - _RANGE)), out=features)
    return features[: len(features) // 2 * 2].reshape(-1, 2 * num_mel_bins)


def whisper_features(
    samples: NDArray[np.float32],
    *,
    rate: int = 16_000,
    num_mel_bins: int = 128,
    num_fft: int = 400,
    hop_len: int = 160,
    loudest: float | None = 1.5,
) -> NDArray[np.float32]:
    """What Voxtral Realtime's encoder reads (Radford et al. 2022, sec. 2.2): samples [S] -> [M, S // hop_len] float32.

    Frames stand around every `hop_len`th sample, from the first; before the first sample and behind the last one stand
    their mirrored neighbours.

    Args:
        samples: -1 to 1, more than `num_fft // 2`.
        rate: Samples in a second.
        num_mel_bins: M.
        num_fft: Samples of a frame.
        hop_len: Samples between the middles of two frames.
        loudest: Power of ten from which 8 are told from silence; None for the loudest bin of the sound.
    """
    mirrored = np.pad(samples, num_fft // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(mirrored, num_fft)[::hop_len][: len(samples) // hop_len]
    filters, window = _slaney_filters(rate, num_mel_bins, num_fft), np.hanning(num_fft + 1)[:-1]
    logs = np.empty((len(frames), num_mel_bins), np.float32)
    for start in range(0, len(frames), _BLOCK):
        power = _powers(frames[start : start + _BLOCK] * window, num_fft) @ filters
        logs[start : start + _BLOCK] = np.log10(np.maximum(power, _FLOOR))
    least = np.float32((logs.max() if loudest is None else loudest) - _RANGE)
    return np.ascontiguousarray(_scaled(np.maximum(logs, least)).T)


def kaldi_filter_bank(
    samples: NDArray[np.float32],
    *,
    rate: int = 16_000,
    num_mel_bins: int = 80,
    frame_ms: float = 25,
    hop_ms: float = 10,
    window: str = "hamming",
) -> NDArray[np.float32]:
    """Kaldi's features without dither: samples [S] -> natural logarithms [F, M] float32, of whole frames alone.

    Args:
        samples: Of any scale, at least a frame.
        rate: Samples in a second.
        num_mel_bins: M.
        frame_ms: Length of a frame.
        hop_ms: Between the beginnings of two frames.
        window: "hamming", "hanning" or "povey".

    Raises:
        ValueError: no such window.
    """
    frame_len, hop_len = int(rate * frame_ms / 1000), int(rate * hop_ms / 1000)
    num_fft = 1 << (frame_len - 1).bit_length()
    frames = np.lib.stride_tricks.sliding_window_view(samples, frame_len)[::hop_len]
    weights, filters = _kaldi_window(window, frame_len), _kaldi_filters(rate, num_mel_bins, num_fft)
    features = np.empty((len(frames), num_mel_bins), np.float32)
    for start in range(0, len(frames), _BLOCK):
        block = frames[start : start + _BLOCK].astype(np.float64)
        block -= block.mean(axis=1, keepdims=True)
        block = block - _PREEMPHASIS * np.concatenate([block[:, :1], block[:, :-1]], axis=1)
        mel = _powers(block * weights, num_fft)[:, :-1] @ filters
        features[start : start + _BLOCK] = np.log(np.maximum(mel, _FLOAT32_EPSILON))
    return features


def stacked_frames(frames: NDArray[np.float32], num_stacked: int, stride: int) -> NDArray[np.float32]:
    """Frames at a low rate (LFR): every `stride`th of them with its neighbours beside it, [F, M] -> [ceil(F / stride),
    num_stacked * M]. The first frame stands for those before it, and the last one for those behind it."""
    places = np.arange(0, len(frames), stride)[:, None] + np.arange(num_stacked) - (num_stacked - 1) // 2
    return np.ascontiguousarray(frames[np.clip(places, 0, len(frames) - 1)].reshape(len(places), -1))


def _scaled(logs: Any) -> Any:
    return logs / 4 + 1


def _powers(frames: NDArray[np.float64], num_fft: int) -> NDArray[np.float64]:
    spectrum = np.fft.rfft(frames, num_fft, axis=-1)
    return np.asarray(spectrum.real**2 + spectrum.imag**2, np.float64)


@lru_cache(maxsize=4)
def _htk_filters(rate: int, num_mel_bins: int, num_fft: int) -> NDArray[np.float64]:
    """Triangles over frequencies, evenly spaced on the mel scale from 0 to half the rate, each of height 1, [B, M]."""
    top = _HTK_SCALE * np.log1p(rate / 2 / _MEL_CORNER_HZ)
    corners = _MEL_CORNER_HZ * np.expm1(np.linspace(0, top, num_mel_bins + 2) / _HTK_SCALE)
    return _triangles(np.linspace(0, rate // 2, num_fft // 2 + 1), corners)


@lru_cache(maxsize=4)
def _slaney_filters(rate: int, num_mel_bins: int, num_fft: int) -> NDArray[np.float64]:
    """Triangles over frequencies, evenly spaced on Slaney's mel scale (linear up to 1 kHz, logarithmic above) from 0 to
    8 kHz, each of area 1, [B, M]."""
    top = _SLANEY_CORNER + np.log(_SLANEY_TOP_HZ / _SLANEY_CORNER_HZ) / _SLANEY_STEP
    mels = np.linspace(0, top, num_mel_bins + 2)
    above = _SLANEY_CORNER_HZ * np.exp(_SLANEY_STEP * (mels - _SLANEY_CORNER))
    corners = np.where(mels < _SLANEY_CORNER, mels * _SLANEY_CORNER_HZ / _SLANEY_CORNER, above)
    triangles = _triangles(np.linspace(0, rate // 2, num_fft // 2 + 1), corners)
    return triangles * (2 / (corners[2:] - corners[:-2]))


@lru_cache(maxsize=4)
def _kaldi_filters(rate: int, num_mel_bins: int, num_fft: int) -> NDArray[np.float64]:
    """Triangles over mels from 20 Hz to half the rate, for all frequencies but the last one, [B - 1, M]."""
    low, top = (_KALDI_SCALE * np.log1p(hertz / _MEL_CORNER_HZ) for hertz in (_LOWEST_KALDI_HZ, rate / 2))
    mels = _KALDI_SCALE * np.log1p(np.arange(num_fft // 2) * (rate / num_fft) / _MEL_CORNER_HZ)
    return _triangles(mels, np.linspace(low, top, num_mel_bins + 2))


def _triangles(places: NDArray[np.float64], corners: NDArray[np.float64]) -> NDArray[np.float64]:
    rising = (places[:, None] - corners[:-2]) / (corners[1:-1] - corners[:-2])
    falling = (corners[2:] - places[:, None]) / (corners[2:] - corners[1:-1])
    return np.maximum(0, np.minimum(rising, falling))


@lru_cache(maxsize=4)
def _kaldi_window(name: str, length: int) -> NDArray[np.float64]:
    if name == "hamming":
        return np.hamming(length)
    if name in ("hanning", "povey"):
        return np.hanning(length) ** (0.85 if name == "povey" else 1.0)
    raise ValueError(f"the window {name!r} is not known; it may be hamming, hanning or povey")
