"""whisper.cpp through pywhispercpp, on a file in its own format; one recording after another."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

from program import Run, serve
from recordings import FIRST_PROMPT, timed


def load(settings: dict[str, Any]) -> tuple[Run, str]:
    from pywhispercpp.model import Model

    model = Model(
        settings["file"],
        n_threads=settings["num_threads"] or os.cpu_count(),
        language="en",
        no_timestamps=True,
        single_segment=True,
        no_context=True,
        temperature_inc=0.0,
        greedy={"best_of": 1},
        print_progress=False,
        redirect_whispercpp_logs_to=None,
    )

    def transcribe(sounds: list[Any], most_tokens: int) -> list[str]:
        return ["".join(part.text for part in model.transcribe(each, max_tokens=most_tokens)) for each in sounds]

    return timed(transcribe), f"pywhispercpp {importlib.metadata.version('pywhispercpp')}"


if __name__ == "__main__":
    serve(load, FIRST_PROMPT)
