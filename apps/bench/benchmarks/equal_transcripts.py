"""Text and times by Quire beside those by faster-whisper, for the same weights in float32.

    python apps/bench/benchmarks/spoken_texts.py SOUNDS
    python apps/bench/benchmarks/equal_transcripts.py peer MODEL SOUNDS peer.json
    python apps/bench/benchmarks/equal_transcripts.py own MODEL SOUNDS peer.json

MODEL is a folder in the format of CTranslate2; `peer` needs the package faster-whisper. Both decode greedily, with one
thread; beside each recording stand the processor seconds of both.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

NEAR_S = 0.011


def peer(model: str, sounds: Path, found: Path) -> None:
    """What faster-whisper writes."""
    from faster_whisper import WhisperModel  # type: ignore[import-not-found]
    from faster_whisper.audio import decode_audio  # type: ignore[import-not-found]

    whisper, texts = WhisperModel(model, compute_type="float32", cpu_threads=1), {}
    for file in sorted(sounds.glob("*.flac")):
        samples, begin = decode_audio(str(file)), time.process_time()
        segments = [
            (each.start, each.end, each.text, each.avg_logprob)
            for each in whisper.transcribe(samples, beam_size=1, temperature=0)[0]
        ]
        texts[file.name] = {"segments": segments, "cpu_s": time.process_time() - begin}
    found.write_text(json.dumps(texts))


def own(model: str, sounds: Path, found: Path) -> None:
    """The same by Quire, compared."""
    import soundfile

    from quire import LLM
    from quire_speech import TranscriptionOptions

    llm, options = LLM(model, dtype="float32", num_threads=1), TranscriptionOptions(temperatures=(0.0,))
    texts: dict[str, Any] = json.loads(found.read_text())
    num_equal = 0
    for name, other in texts.items():
        samples, rate = soundfile.read(sounds / name, dtype="float32")
        begin = time.process_time()
        (transcription,) = llm.transcribe(samples, options)
        spent_s = time.process_time() - begin
        pairs = list(zip(transcription.segments, other["segments"], strict=False))
        is_equal = len(transcription.segments) == len(other["segments"]) and all(
            mine.text == text and abs(mine.start_s - start) < NEAR_S and abs(mine.end_s - end) < NEAR_S
            for mine, (start, end, text, _) in pairs
        )
        num_equal += is_equal
        apart = max((abs(mine.avg_logprob - logprob) for mine, (*_, logprob) in pairs), default=0.0)
        state = "equal" if is_equal else "DIFFERENT"
        print(f"{name}: {state}; log probability within {apart:.1e}; {len(samples) / rate:.1f} s of sound in "
              f"{spent_s:.2f} s, faster-whisper {other['cpu_s']:.2f} s")  # fmt: skip
    print(f"{num_equal} of {len(texts)} equal")


if __name__ == "__main__":
    {"peer": peer, "own": own}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
