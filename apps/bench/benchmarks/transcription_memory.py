"""Memory of a process that transcribes one long recording.

    python apps/bench/benchmarks/transcription_memory.py MODEL --minutes 60

MODEL is a Whisper. Five minutes that espeak-ng says are repeated, each time a little louder or softer, so that nothing
is found in a cache; the recording is a FLAC file, read in pieces. Prints the memory of this process that no file backs
each `--every` seconds, and the highest of each quarter of the run.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import soundfile
from spoken_texts import long_recording

from quire import LLM
from quire_bench.spoken import RATE
from quire_speech import TranscriptionOptions

PART_S = 300


def write_recording(file: Path, seconds: int) -> None:
    """So much speech."""
    part, volume = long_recording(PART_S), np.random.default_rng(0)
    with soundfile.SoundFile(file, "w", RATE, channels=1) as sound:
        for start in range(0, seconds, PART_S):
            sound.write(part[: (seconds - start) * RATE] * volume.uniform(0.6, 1.0))


def memory_mib() -> int:
    """Resident memory of this process, without pages of files."""
    status = Path("/proc/self/status").read_text()
    return sum(int(found) for found in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+)", status, re.MULTILINE)) // 1024


def main() -> None:
    """Transcribe, and look on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two looks")
    args = parser.parse_args()
    over, seen = threading.Event(), list[int]()

    def look() -> None:
        while not over.wait(args.every):
            seen.append(memory_mib())
            print(f"{time.monotonic() - begin:.0f} s: {seen[-1]} MiB", flush=True)

    with tempfile.TemporaryDirectory() as folder, LLM(args.model, dtype="float32") as llm:
        file = Path(folder) / "long.flac"
        write_recording(file, 60 * args.minutes)
        llm.transcribe(np.zeros(RATE, np.float32))
        print(f"idle: {memory_mib()} MiB; a KV cache of {llm.engine_info.memory_bytes['KV cache'] >> 20} MiB")
        begin, looker = time.monotonic(), threading.Thread(target=look)
        looker.start()
        try:
            (found,) = llm.transcribe(str(file), TranscriptionOptions(temperatures=(0.0,)))
        finally:
            over.set()
            looker.join()
        spent_s = time.monotonic() - begin
    print(f"{found.duration_s:.0f} s of sound in {spent_s:.0f} s, {len(found.segments)} segments")
    quarters = [max(part) for part in np.array_split(seen, 4) if len(part)]
    print("highest of each quarter, MiB:", *quarters)


if __name__ == "__main__":
    main()
