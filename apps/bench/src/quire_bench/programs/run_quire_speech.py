"""Quire itself, in process: `LLM.transcribe`."""

from __future__ import annotations

from typing import Any

from program import Run, serve
from recordings import FIRST_PROMPT, timed


def load(settings: dict[str, Any]) -> tuple[Run, str]:
    from quire import LLM, __version__
    from quire_speech import TranscriptionOptions

    llm = LLM(
        settings["model"],
        dtype=settings["dtype"],
        quantization=settings.get("quantization"),
        num_threads=settings["num_threads"],
        max_num_seqs=settings["max_num_seqs"],
    )

    def transcribe(sounds: list[Any], most_tokens: int) -> list[str]:
        options = TranscriptionOptions(
            language="en",
            temperatures=(0.0,),
            timestamps=False,
            condition_on_previous_text=False,
            no_speech_threshold=None,
            max_tokens=most_tokens,
        )
        return [found.text for found in llm.transcribe(sounds, options)]

    return timed(transcribe), __version__


if __name__ == "__main__":
    serve(load, FIRST_PROMPT)
