"""Recordings to compare transcribers with: texts spoken by espeak-ng, with noise, tones and silence.

    python apps/bench/benchmarks/spoken_texts.py FOLDER

writes them as FLAC files. Everything is made from the numbers of the recordings, so that a run can be repeated.
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

RATE = 16_000
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


def main() -> None:
    """Write 32 recordings."""
    if shutil.which("espeak-ng") is None:
        raise SystemExit("needs espeak-ng (Debian: apt-get install espeak-ng)")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(32):
        soundfile.write(folder / f"{number:02}.flac", recording(number), RATE)


if __name__ == "__main__":
    main()
