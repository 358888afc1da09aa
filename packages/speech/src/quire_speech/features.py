"""Samples -> log-mel spectrograms, as Whisper hears them (Radford et al. 2022, sec. 2.2), and as Fast Conformers do.

Shape legend: S samples, F frames, M mel bins, B frequencies of a frame.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "FRAMES_PER_S",
    "HOP_LENGTH",
    "NUM_FFT",
    "SAMPLES_PER_S",
    "frame_powers",
    "log_mel",
    "log_mel_power",
    "mel_filters",
    "scaled",
    "standardized_log_mel",
    "window_log_mel",
    "window_samples",
]

SAMPLES_PER_S = 16_000
NUM_FFT = 400
"""Samples of a frame."""
HOP_LENGTH = 160
"""Samples between the beginnings of two frames."""
FRAMES_PER_S = SAMPLES_PER_S // HOP_LENGTH
WINDOW_S = 30
"""Longest sound that networks hear at once."""
_VARIANCE_FLOOR = 1e-7
_FLOOR = 1e-10
"""Least power of a mel bin."""
_RANGE = 8.0
"""Powers of ten between the loudest bin and the least that is told from silence."""
_STANDARD_FLOOR = 2.0**-24
"""Power that is added to each mel bin before its logarithm is taken, and then"""
_STANDARD_EPS = 1e-5
"""to the deviation by which a bin is divided."""
_NUM_PIECE_FRAMES = 750
"""Frames that are transformed at once: their arrays stay in the processor's cache."""


def _mel_of(hertz: NDArray[np.float64]) -> NDArray[np.float64]:
    """Slaney's scale: linear below 1 kHz, logarithmic above."""
    linear = hertz * 3 / 200
    return np.where(hertz < 1000, linear, 15 + np.log(np.maximum(hertz, 1000) / 1000) * 27 / np.log(6.4))


def _hertz_of(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(mel < 15, mel * 200 / 3, 1000 * np.exp(np.log(6.4) / 27 * (mel - 15)))


@lru_cache(maxsize=4)
def mel_filters(num_mel_bins: int, num_fft: int = NUM_FFT) -> NDArray[np.float64]:
    """Triangles over frequencies, evenly spaced on Slaney's scale from 0 to 8 kHz and each of area 1, [B, M], where
    B is num_fft // 2 + 1."""
    top = _mel_of(np.array([SAMPLES_PER_S / 2]))[0]
    corners = _hertz_of(np.linspace(0, top, num_mel_bins + 2))
    frequencies = np.linspace(0, SAMPLES_PER_S / 2, num_fft // 2 + 1)[:, None]
    rising = (frequencies - corners[:-2]) / (corners[1:-1] - corners[:-2])
    falling = (corners[2:] - frequencies) / (corners[2:] - corners[1:-1])
    triangles = np.maximum(0, np.minimum(rising, falling))
    return np.ascontiguousarray(triangles * (2 / (corners[2:] - corners[:-2])))


@lru_cache(maxsize=1)
def _window() -> NDArray[np.float64]:
    return np.hanning(NUM_FFT + 1)[:-1]


def frame_powers(samples: NDArray[np.float32], num_mel_bins: int, count: int) -> NDArray[np.float32]:
    """Logarithms (base 10) of the power in each mel bin of the first frames: samples [S], at least as many as these
    frames have -> [count, M]."""
    frames = np.lib.stride_tricks.sliding_window_view(samples, NUM_FFT)[::HOP_LENGTH][:count]
    filters, window = mel_filters(num_mel_bins), _window()
    powers = np.empty((count, num_mel_bins), np.float32)
    for start in range(0, count, _NUM_PIECE_FRAMES):
        spectrum = np.fft.rfft(frames[start : start + _NUM_PIECE_FRAMES] * window, axis=-1)
        power = (spectrum.real**2 + spectrum.imag**2) @ filters
        powers[start : start + _NUM_PIECE_FRAMES] = np.log10(np.maximum(power, _FLOOR, out=power), out=power)
    return powers


def log_mel_power(samples: NDArray[np.float32], num_mel_bins: int) -> NDArray[np.float32]:
    """Logarithms (base 10) of the power in each mel bin, of all frames whose middle is a sample: samples [S] ->
    [S // HOP_LENGTH, M]. Before the first sample and behind the last one stand their mirrored neighbours."""
    half = NUM_FFT // 2
    num_frames = len(samples) // HOP_LENGTH
    if not num_frames:
        return np.empty((0, num_mel_bins), np.float32)
    mirrored = np.pad(samples, half, mode="reflect" if len(samples) > half else "symmetric")
    return frame_powers(mirrored, num_mel_bins, num_frames)


def scaled(powers: NDArray[np.float32], loudest: float) -> NDArray[np.float32]:
    """What the network reads: log powers [F, M], with nothing more than 8 powers of ten below `loudest`, scaled to
    about -1 to 1, as [M, F]."""
    return np.ascontiguousarray(((np.maximum(powers, np.float32(loudest - _RANGE)) + 4) / 4).T)


def window_log_mel(samples: NDArray[np.float32], num_mel_bins: int, num_frames: int) -> NDArray[np.float32]:
    """The spectrogram of a recording with silence behind it, or of its beginning: samples [S] -> [M, num_frames]."""
    window = np.zeros(num_frames * HOP_LENGTH, np.float32)
    window[: len(samples)] = samples[: len(window)]
    return log_mel(window, num_mel_bins)


def window_samples(
    samples: NDArray[np.float32],
    *,
    least: int,
    most: int,
    normalizes: bool,
    frame_len: int = 1,
    drops_rest: bool = False,
) -> NDArray[np.float32]:
    """What a network reads that takes samples themselves: a recording or its beginning, [S] -> [1, S].

    Args:
        least: Silence is put behind shorter ones, up to so many samples.
        most: Samples of the longest that the network reads, which is never more than half a minute of them.
        normalizes: They are scaled to mean 0 and variance 1 before, as Wav2Vec 2.0's are.
        frame_len: The network reads frames of so many samples; silence fills the last one.
        drops_rest: That frame is nothing but silence, as where the feature extractor gives a mask: the network leaves
            out what fills no frame.
    """
    window = samples[: min(most, WINDOW_S * SAMPLES_PER_S)].astype(np.float32)
    whole, missing = len(window) // frame_len * frame_len, -len(window) % frame_len
    if not drops_rest:
        window = np.pad(window, (0, missing))
    if normalizes and len(window):
        window = (window - window.mean()) / np.sqrt(window.var() + _VARIANCE_FLOOR)
    if drops_rest and missing:
        window = np.pad(window[:whole], (0, frame_len))
    return np.pad(window, (0, max(0, least - len(window))))[None].astype(np.float32)


def standardized_log_mel(
    samples: NDArray[np.float32],
    *,
    num_mel_bins: int,
    max_frames: int,
    num_fft: int = 512,
    window_length: int = NUM_FFT,
    hop_length: int = HOP_LENGTH,
    preemphasis: float = 0.97,
) -> NDArray[np.float32]:
    """What Fast Conformers read (NeMo's features): natural logarithms of the power in each mel bin of all frames whose
    middle is a sample, each bin with mean 0 and variance 1 over the whole sound. Silence stands before the first sample
    and behind the last one.

    Args:
        samples: [S]. Silence is put behind shorter ones than two frames.
        num_mel_bins: M.
        max_frames: Most frames; what is behind them is left out.
        num_fft: Samples that are transformed, in whose middle the window stands.
        window_length: Samples that Hann's window lets through.
        hop_length: Samples between the middles of two frames.
        preemphasis: Share of each sample that is taken off the next one.

    Returns:
        [S // hop_length, M] float32.
    """
    sound = np.asarray(samples[: max_frames * hop_length], np.float64)
    sound = np.pad(sound, (0, max(0, 2 * hop_length - len(sound))))
    sound = np.concatenate((sound[:1], sound[1:] - preemphasis * sound[:-1]))
    before = (num_fft - window_length) // 2
    window = np.pad(np.hanning(window_length), (before, num_fft - window_length - before))
    count, half = len(sound) // hop_length, num_fft // 2
    frames = np.lib.stride_tricks.sliding_window_view(np.pad(sound, half), num_fft)[::hop_length][:count]
    filters, found = mel_filters(num_mel_bins, num_fft), np.empty((count, num_mel_bins))
    for start in range(0, count, _NUM_PIECE_FRAMES):
        spectrum = np.fft.rfft(frames[start : start + _NUM_PIECE_FRAMES] * window, axis=-1)
        power = (spectrum.real**2 + spectrum.imag**2) @ filters
        found[start : start + _NUM_PIECE_FRAMES] = np.log(power + _STANDARD_FLOOR)
    deviation = found.std(axis=0, ddof=1)
    return np.asarray((found - found.mean(axis=0)) / (deviation + _STANDARD_EPS), np.float32)


def log_mel(samples: NDArray[np.float32], num_mel_bins: int) -> NDArray[np.float32]:
    """The spectrogram of a recording: samples [S], 16 kHz, -1 to 1 -> [M, S // HOP_LENGTH] float32."""
    powers = log_mel_power(samples, num_mel_bins)
    return scaled(powers, float(powers.max(initial=-10.0)))
