"""Recordings for benchmarks of speech: texts that espeak-ng speaks, or what a folder's WAV files hold, cut to a length.

The same seed gives the same recording. Knows no model.
"""

from __future__ import annotations

import io
import random
import shutil
import subprocess
import wave
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire_interfaces import ConfigError

__all__ = ["RATE", "SENTENCES", "VOICES", "Speech"]

RATE = 16_000
"""Samples a second."""
SENTENCES = """The committee will meet again on Thursday morning to discuss the budget.
Please send the report to every member before the end of the week.
A heavy storm crossed the coast last night and left many houses without power.
She opened the window and listened to the birds in the garden.
The price of bread has gone up by ten percent since January.
We have three questions, and the second one is the most important.
My brother works in a small shop near the railway station.
Water boils at one hundred degrees and freezes at zero.
The train to London leaves at half past nine from platform four.
Nobody knew the answer, so the teacher explained it again.
In the summer we go to the mountains and walk for hours.
He bought a new computer, but the old one was faster.
The doctor said that she should rest and drink a lot of water.
Two weeks later the letter arrived with a red stamp on it.
Music was playing in the room next to ours until midnight.
The company opened an office in Berlin and another in Madrid.
Children under twelve may visit the museum for free.
They measured the temperature every hour and wrote it down.
The river is wide here, and the bridge is very old.
If you turn left after the church, you will see the market.""".splitlines()
VOICES = ("en-us", "en-gb", "en-us+f3", "en-gb+m3")
Samples = NDArray[np.float32]
_ESPEAK_TIMEOUT_S = 60


class Speech:
    """Makes recordings.

    Args:
        scratch: Folder for them.
        source: Folder with WAV files of 16 kHz, one channel and 16 bits, to cut from; None for espeak-ng.

    Raises:
        ConfigError: the folder holds no such file, or there is no espeak-ng.
    """

    def __init__(self, scratch: Path, source: Path | None = None) -> None:
        self._scratch, self._spoken = scratch, dict[tuple[int, str], Samples]()
        self._sounds: list[Samples] = []
        if source is not None:
            self._sounds = [read_wav(path) for path in sorted(source.glob("*.wav"))]
            if not self._sounds:
                raise ConfigError(f"--recordings {source}: there are no WAV files", field="recordings")
        elif shutil.which("espeak-ng") is None:
            raise ConfigError(
                "speech is made by espeak-ng, which is not here: install it (Debian: apt-get install espeak-ng), or "
                "name a folder with WAV files with --recordings",
                field="recordings",
            )

    def recording(self, seconds: int, seed: int) -> Path:
        """A WAV file of so many seconds."""
        path = self._scratch / f"{seconds}s-{seed}.wav"
        if not path.exists():
            write_wav(path, self._samples(seconds * RATE, random.Random(seed)))
        return path

    def _samples(self, count: int, chooser: random.Random) -> Samples:
        parts: list[Samples] = []
        missing = count
        while missing > 0:
            if self._sounds:
                parts.append(chooser.choice(self._sounds))
            else:
                spoken = self._sentence(chooser.randrange(len(SENTENCES)), chooser.choice(VOICES))
                parts += [spoken, np.zeros(int(RATE * chooser.uniform(0.1, 0.8)), np.float32)]
            missing = count - sum(map(len, parts))
        # Never the same samples twice: an engine that remembers a sound is not to be measured.
        return np.concatenate(parts)[:count] * np.float32(chooser.uniform(0.9, 1.0))

    def _sentence(self, number: int, voice: str) -> Samples:
        if (number, voice) not in self._spoken:
            command = ["espeak-ng", "-v", voice, "--stdout", SENTENCES[number]]
            done = subprocess.run(command, capture_output=True, check=True, timeout=_ESPEAK_TIMEOUT_S)
            self._spoken[number, voice] = _resampled(*_pcm(io.BytesIO(done.stdout)))
        return self._spoken[number, voice]


def read_wav(path: Path) -> Samples:
    """Samples of a file.

    Raises:
        ConfigError: it is no WAV file of `RATE`, one channel and 16 bits.
    """
    try:
        samples, rate = _pcm(path)
    except (OSError, EOFError, wave.Error) as error:
        raise ConfigError(f"{path} is no WAV file that is understood ({error})", field="recordings") from None
    if rate != RATE:
        raise ConfigError(
            f"{path} has {rate} samples a second; `ffmpeg -i FILE -ar {RATE} FILE.wav`", field="recordings"
        )
    return samples


def write_wav(path: Path, samples: Samples) -> None:
    """Write samples of -1 to 1."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples.clip(-1, 1) * 32767).round().astype("<i2").tobytes())


def _pcm(file: Path | io.BytesIO) -> tuple[Samples, int]:
    with wave.open(str(file) if isinstance(file, Path) else file) as opened:
        if opened.getsampwidth() != 2 or opened.getnchannels() != 1:
            raise wave.Error("not one channel of 16 bits")
        data = opened.readframes(opened.getnframes())
        samples = np.frombuffer(data[: len(data) // 2 * 2], "<i2").astype(np.float32) / np.float32(32768)
        return samples, int(opened.getframerate())


def _resampled(samples: Samples, rate: int) -> Samples:
    """At `RATE`: the frequencies that both rates have."""
    count = len(samples) * RATE // rate
    spectrum = np.fft.rfft(samples)[: count // 2 + 1]
    return np.asarray(np.fft.irfft(spectrum, count) * (count / len(samples)), np.float32)
