"""OpenVINO GenAI's continuous batching pipeline, from a model that its own converter wrote."""

from __future__ import annotations

from typing import Any

from program import Run, check_lengths, serve


def load(settings: dict[str, Any]) -> tuple[Run, str]:
    import numpy
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = settings["max_num_seqs"]
    scheduler.max_num_batched_tokens = max(2048, settings["max_num_seqs"])
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": settings["num_threads"]} if settings["num_threads"] else {}
    pipeline = openvino_genai.ContinuousBatchingPipeline(settings["file"], scheduler, "CPU", properties)

    def run(prompts: list[list[int]], output_lens: list[int]) -> None:
        configs = []
        for length in output_lens:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = length, True, False
            configs.append(config)
        inputs = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
        results = pipeline.generate(inputs, configs)
        check_lengths([len(result.m_generation_ids[0]) for result in results], output_lens)

    return run, openvino_genai.__version__


if __name__ == "__main__":
    serve(load)
