"""Sound as it comes over a line: PCM of 16 bits and G.711, in blocks of any length, to float32 [samples] at 16 kHz.

G.711 (ITU-T): 8 bits a sample at 8 kHz, logarithmic, in two laws. Other rates are resampled by a windowed sinc whose
state goes from block to block, so that blocks give what the whole gives.
"""

from __future__ import annotations

from math import gcd
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quire_interfaces import wrong_value

__all__ = ["RATE", "LiveSound", "Resampler", "a_law", "mu_law"]

RATE = 16_000
_ZEROS = 16
"""Zeros of the sinc on each side."""
Samples = NDArray[np.float32]


def mu_law() -> Samples:
    """Sample of each byte of mu-law (G.711), float32 [256]."""
    codes = ~np.arange(256, dtype=np.int32) & 0xFF
    sizes = (((codes & 0x0F) << 3) + 0x84 << ((codes & 0x70) >> 4)) - 0x84
    return np.asarray(np.where(codes & 0x80, -sizes, sizes) / 32768, np.float32)


def a_law() -> Samples:
    """Sample of each byte of A-law (G.711), float32 [256]."""
    codes = np.arange(256, dtype=np.int32) ^ 0x55
    exponents, mantissas = (codes & 0x70) >> 4, (codes & 0x0F) << 4
    sizes = np.where(exponents == 0, mantissas + 8, mantissas + 0x108 << np.maximum(exponents - 1, 0))
    return np.asarray(np.where(codes & 0x80, sizes, -sizes) / 32768, np.float32)


class Resampler:
    """From one rate to another, block by block.

    Args:
        rate: Samples in a second that come.
        to_rate: Samples in a second that go.
    """

    def __init__(self, rate: int, to_rate: int = RATE) -> None:
        divisor = gcd(rate, to_rate)
        self._up, self._down = to_rate // divisor, rate // divisor
        widest = max(self._up, self._down)
        places = np.arange(-_ZEROS * widest, _ZEROS * widest + 1)
        taps = np.sinc(places / widest) * np.kaiser(len(places), 8.0)
        self._taps = (taps * self._up / taps.sum()).astype(np.float32)
        self._delay = _ZEROS * widest
        """Of the filter, in samples of both rates' common one."""
        self._line = np.zeros(self._delay, np.float32)
        """What the filter still needs, at the common rate; zeros stand before the sound."""

    def feed(self, samples: Samples) -> Samples:
        """What is certain of the new sound, float32 [samples] at `to_rate`."""
        if self._up == self._down:
            return samples
        raised = np.zeros(len(samples) * self._up, np.float32)
        raised[:: self._up] = samples
        self._line = np.concatenate([self._line, raised])
        num_certain = len(self._line) - len(self._taps) + 1
        if num_certain <= 0:
            return np.empty(0, np.float32)
        windows = np.lib.stride_tricks.sliding_window_view(self._line, len(self._taps))[:: self._down]
        out = np.asarray(windows @ self._taps, np.float32)
        self._line = self._line[len(out) * self._down :].copy()
        return out

    def finish(self) -> Samples:
        """The sound has ended: the rest of it."""
        return self.feed(np.zeros(-(-self._delay // self._up), np.float32))


class LiveSound:
    """Bytes of a line to samples.

    Args:
        form: "pcm16" (little endian), "g711_ulaw" or "g711_alaw".
        rate: Samples in a second; G.711 has 8,000.

    Raises:
        RequestError: no such form or rate.
    """

    def __init__(self, form: Literal["pcm16", "g711_ulaw", "g711_alaw"] = "pcm16", rate: int = 24_000) -> None:
        if form not in ("pcm16", "g711_ulaw", "g711_alaw"):
            raise wrong_value("format", form, 'be "audio/pcm", "audio/pcmu" or "audio/pcma"')
        if rate not in (8_000, 16_000, 24_000, 44_100, 48_000):
            raise wrong_value("rate", rate, "be 8000, 16000, 24000, 44100 or 48000")
        self._table = {"g711_ulaw": mu_law, "g711_alaw": a_law}[form]() if form != "pcm16" else None
        self._resampler, self._odd = Resampler(rate), b""

    def feed(self, data: bytes) -> Samples:
        """The samples of new bytes, which may end within a sample."""
        if self._table is not None:
            return self._resampler.feed(self._table[np.frombuffer(data, np.uint8)])
        data = self._odd + data
        whole = len(data) & ~1
        self._odd = data[whole:]
        return self._resampler.feed(np.frombuffer(data[:whole], "<i2").astype(np.float32) / np.float32(32768))
