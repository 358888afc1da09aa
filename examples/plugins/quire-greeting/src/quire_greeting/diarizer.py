"""Tells two speakers apart by pitch: lags at which a voice is most like itself. Enough to show the seam."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire_speech import Segment

RATE = 16_000
LOWEST_HZ, HIGHEST_HZ = 70, 400


class ByPitch:
    """Segments whose pitch is above the mean of all are of the second speaker."""

    def __call__(
        self, samples: NDArray[np.float32], segments: Sequence[Segment], known_names: Sequence[str]
    ) -> list[str]:
        first, second = [*known_names, "A", "B"][:2] if len(known_names) != 1 else (known_names[0], "B")
        pitches = [pitch_hz(samples[int(each.start_s * RATE) : int(each.end_s * RATE)]) for each in segments]
        middle = (min(pitches) + max(pitches)) / 2 if pitches else 0.0
        return [second if pitch > middle else first for pitch in pitches]


def pitch_hz(samples: NDArray[np.float32]) -> float:
    """The most frequent pitch of a voice, by autocorrelation; 0 for less than a tenth of a second."""
    if len(samples) < RATE // 10:
        return 0.0
    spectrum = np.abs(np.fft.rfft(samples, 2 * len(samples))) ** 2
    likeness = np.fft.irfft(spectrum)[: RATE // LOWEST_HZ]
    shortest = RATE // HIGHEST_HZ
    return RATE / (shortest + int(np.argmax(likeness[shortest:])))
