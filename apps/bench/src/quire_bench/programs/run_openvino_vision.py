"""OpenVINO GenAI's pipeline for models that see, from a model that its own converter wrote."""

from __future__ import annotations

from typing import Any

from picture import FIRST_PROMPT, QUESTION, pixels
from program import Run, check_lengths, serve


def load(settings: dict[str, Any]) -> tuple[Run, str]:
    import numpy
    import openvino
    import openvino_genai

    properties = {"INFERENCE_NUM_THREADS": settings["num_threads"]} if settings["num_threads"] else {}
    pipeline = openvino_genai.VLMPipeline(settings["file"], "CPU", **properties)

    def run(prompts: list[Any], output_lens: list[int]) -> None:
        for prompt, length in zip(prompts, output_lens, strict=True):
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = length, True, False
            shape = (1, prompt["height"], prompt["width"], 3)
            image = openvino.Tensor(numpy.frombuffer(pixels(prompt), dtype=numpy.uint8).reshape(shape))
            result = pipeline.generate(QUESTION, images=[image], generation_config=config)
            check_lengths([result.perf_metrics.get_num_generated_tokens()], [length])

    return run, openvino_genai.__version__


if __name__ == "__main__":
    serve(load, FIRST_PROMPT)
