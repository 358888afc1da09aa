"""Recordings, as programs of engines that transcribe get them: with the standard library and numpy alone.

All transcribe greedily, without times of segments: windows of half a minute one behind the other, each by itself.
"""

from __future__ import annotations

import time
import wave
from collections.abc import Callable, Sequence
from typing import Any

FIRST_PROMPT = None
"""A second of a tone."""
RATE = 16_000
WINDOW_S = 30


def samples_of(prompt: str | None) -> Any:
    """Samples [S] float32, 16 kHz, of a file, or of the first prompt."""
    import numpy

    if prompt is None:
        return numpy.sin(numpy.arange(RATE, dtype=numpy.float32) * numpy.float32(0.2)) * numpy.float32(0.1)
    with wave.open(prompt) as file:
        data = file.readframes(file.getnframes())
    return numpy.frombuffer(data, "<i2").astype(numpy.float32) / 32768


def timed(
    transcribe: Callable[[list[Any], int], Sequence[str]],
) -> Callable[[list[Any], list[int]], dict[str, Any]]:
    """A program's `run`, of a function from samples of all recordings and most tokens of a window to texts. It says
    "cpu_s", the processor time of all threads, and how long the texts are."""

    def run(prompts: list[Any], output_lens: list[int]) -> dict[str, Any]:
        sounds = [samples_of(prompt) for prompt in prompts]
        start = time.process_time()
        texts = transcribe(sounds, max(output_lens))
        spent_s = time.process_time() - start
        if len(texts) != len(prompts):
            raise RuntimeError(f"{len(prompts)} recordings have {len(texts)} transcripts")
        return {"cpu_s": spent_s, "text_lens": [len(text) for text in texts]}

    return run
