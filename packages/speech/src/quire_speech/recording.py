"""A recording that is read window by window, of any length: what was read is forgotten.

Shape legend: S samples, F frames, M mel bins.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire_speech.features import FRAMES_PER_S, HOP_LENGTH, NUM_FFT, frame_powers, scaled

__all__ = ["Recording"]

_HALF = NUM_FFT // 2
SILENCE = -8.0
"""Power of ten that no mel bin of a silent window reaches: less than what the last of 16 bits gives as noise."""


class Recording:
    """Samples come in blocks, spectrograms of windows go out. Not thread-safe.

    A window is told from silence by the loudest frame of all that was heard so far, and by that of the whole recording
    where it was there from the start (`of`), as in OpenAI's Whisper.

    Args:
        num_mel_bins: Height of a spectrogram.
        num_frames: Length of a window.
    """

    def __init__(self, num_mel_bins: int, num_frames: int) -> None:
        self.num_mel_bins, self.num_frames = num_mel_bins, num_frames
        self.num_samples = 0
        """Samples that were heard."""
        self.is_finished = False
        self._first = 0
        """Frame that `_powers` begins with."""
        self._powers: list[NDArray[np.float32]] = []
        self._num_powers = 0
        self._rest: NDArray[np.float32] = np.empty(0, np.float32)
        """Samples from 200 before the next frame's middle on; the first ones mirrored."""
        self._loudest = -10.0

    @classmethod
    def of(cls, samples: NDArray[np.float32], num_mel_bins: int, num_frames: int) -> Recording:
        """A whole recording."""
        recording = cls(num_mel_bins, num_frames)
        recording.add(samples)
        recording.finish()
        return recording

    @property
    def duration_s(self) -> float:
        """Of what was heard."""
        return self.num_samples * 1.0 / (HOP_LENGTH * FRAMES_PER_S)

    @property
    def num_known(self) -> int:
        """Frames that are known from the first on; the last of them are the recording's end once it is finished."""
        return self._first + self._num_powers

    def add(self, samples: NDArray[np.float32]) -> None:
        """Hear more: samples [S], 16 kHz, -1 to 1."""
        assert not self.is_finished
        if not len(samples):
            return
        self._rest = np.concatenate([self._rest, samples])
        self.num_samples += len(samples)
        if self.num_known == 0 and self.num_samples > NUM_FFT:
            self._begin()
        if self.num_known or self.num_samples > NUM_FFT:
            self._compute(max(0, (len(self._rest) - NUM_FFT) // HOP_LENGTH + 1))

    def finish(self) -> None:
        """There is no more: silence follows."""
        if self.is_finished:
            return
        self.is_finished = True
        wanted = self.num_samples // HOP_LENGTH - self.num_known
        if wanted <= 0:
            return
        if self.num_known == 0 and self.num_samples <= NUM_FFT:
            self._rest = np.pad(self._rest, (0, NUM_FFT + 1 - len(self._rest)))
            self._begin()
        missing = (wanted - 1) * HOP_LENGTH + NUM_FFT - len(self._rest)
        self._rest = np.pad(self._rest, (0, max(0, missing)))
        self._compute(wanted)

    def forget(self, before: int) -> None:
        """Let go of frames before this one."""
        while self._powers and self._first + len(self._powers[0]) <= before:
            gone = self._powers.pop(0)
            self._first += len(gone)
            self._num_powers -= len(gone)

    def has_window(self, seek: int) -> bool:
        """Whether all of the window that begins with this frame is known."""
        return self.is_finished or self.num_known >= seek + self.num_frames

    def window(self, seek: int) -> NDArray[np.float32]:
        """The spectrogram of a window that was not forgotten, [M, num_frames], zeros behind the end."""
        powers = self._between(seek, seek + self.num_frames)
        features = np.zeros((self.num_mel_bins, self.num_frames), np.float32)
        features[:, : len(powers)] = scaled(powers, self._loudest)
        return features

    def is_silent(self, seek: int) -> bool:
        """Whether a window holds nothing but silence."""
        return float(self._between(seek, seek + self.num_frames).max(initial=-10.0)) < SILENCE

    def _begin(self) -> None:
        """Mirror what stands before the first sample."""
        self._rest = np.concatenate([self._rest[_HALF:0:-1], self._rest])

    def _compute(self, count: int) -> None:
        if count <= 0:
            return
        powers = frame_powers(self._rest, self.num_mel_bins, count)
        self._rest = self._rest[count * HOP_LENGTH :]
        self._powers.append(powers)
        self._num_powers += count
        self._loudest = max(self._loudest, float(powers.max()))

    def _between(self, start: int, end: int) -> NDArray[np.float32]:
        """Powers of frames [start, end), as far as there are any, [F, M]."""
        assert start >= self._first
        parts, place = [], self._first
        for powers in self._powers:
            if place < end and place + len(powers) > start:
                parts.append(powers[max(0, start - place) : end - place])
            place += len(powers)
        return np.concatenate(parts) if parts else np.empty((0, self.num_mel_bins), np.float32)
