"""Recordings to compare transcribers with: texts spoken by espeak-ng, with noise, tones and silence.

    python apps/bench/benchmarks/spoken_texts.py FOLDER
    python apps/bench/benchmarks/spoken_texts.py FOLDER --long 300 1800

writes 32 of them as FLAC files, or such of so many seconds. Everything is made from the numbers of the recordings, so
that a run can be repeated.
"""

from __future__ import annotations

import io
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from quire_bench.spoken import RATE, SENTENCES, VOICES

Samples = NDArray[np.float32]


def spoken(text: str, voice: str, words_per_minute: int) -> Samples:
    """The text as samples of 16 kHz."""
    command = ["espeak-ng", "-v", voice, "-s", str(words_per_minute), "--stdout", text]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    samples, rate = soundfile.read(io.BytesIO(done.stdout), dtype="float32")
    return np.asarray(soxr.resample(samples, rate, RATE), np.float32)


def recording(number: int) -> Samples:
    """From 5 s to minutes of speech; what else is heard depends on the number."""
    chooser, noise = random.Random(number), np.random.default_rng(number)
    num_sentences = (1, 2, 3, 5, 8, 16)[number % 6]
    voice, speed = VOICES[number % 4], 120 + 10 * (number % 5)
    parts: list[Samples] = []
    for sentence in chooser.sample(SENTENCES, num_sentences):
        parts.append(spoken(sentence, voice, speed))
        parts.append(np.zeros(int(RATE * chooser.uniform(0.1, 0.8)), np.float32))
        if number % 7 == 3 and len(parts) == 4:
            parts.append(np.zeros(12 * RATE, np.float32))
        if number % 7 == 5 and len(parts) == 2:
            parts.append(tones(chooser, 6.0))
    samples = np.concatenate(parts)
    if number % 3 == 1:
        samples = samples + (0.003 * noise.standard_normal(len(samples))).astype(np.float32)
    return samples.clip(-1, 1).astype(np.float32)


def tones(chooser: random.Random, seconds: float) -> Samples:
    """A slow melody of plain tones."""
    time = np.arange(int(RATE * seconds / 12)) / RATE
    pitches = [220 * 2 ** (chooser.choice((0, 2, 4, 5, 7, 9)) / 12) for _ in range(12)]
    return np.concatenate([0.2 * np.sin(2 * np.pi * pitch * time) for pitch in pitches]).astype(np.float32)


def long_recording(seconds: int) -> Samples:
    """Recordings one behind the other."""
    parts: list[Samples] = []
    while sum(map(len, parts)) < seconds * RATE:
        parts.append(recording(100 + len(parts)))
    return np.concatenate(parts)[: seconds * RATE]


def main() -> None:
    """Write the recordings."""
    if shutil.which("espeak-ng") is None:
        raise SystemExit("needs espeak-ng (Debian: apt-get install espeak-ng)")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    if sys.argv[2:3] == ["--long"]:
        for seconds in map(int, sys.argv[3:]):
            soundfile.write(folder / f"{seconds}s.flac", long_recording(seconds), RATE)
        return
    for number in range(32):
        soundfile.write(folder / f"{number:02}.flac", recording(number), RATE)


if __name__ == "__main__":
    main()
