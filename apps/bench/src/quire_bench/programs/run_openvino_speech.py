"""OpenVINO GenAI's pipeline for Whisper on a folder in its own format, greedy, one recording after another."""

from __future__ import annotations

from typing import Any

from program import Run, serve
from recordings import FIRST_PROMPT, timed


def load(settings: dict[str, Any]) -> tuple[Run, str]:
    import openvino_genai

    properties: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY"}
    if settings["num_threads"]:
        properties["INFERENCE_NUM_THREADS"] = settings["num_threads"]
    if settings["dtype"] == "float32":
        properties["INFERENCE_PRECISION_HINT"] = "f32"
    pipeline = openvino_genai.WhisperPipeline(settings["file"], "CPU", **properties)

    def transcribe(sounds: list[Any], most_tokens: int) -> list[str]:
        return [str(pipeline.generate(each.tolist(), max_new_tokens=most_tokens)) for each in sounds]

    return timed(transcribe), openvino_genai.__version__


if __name__ == "__main__":
    serve(load, FIRST_PROMPT)
