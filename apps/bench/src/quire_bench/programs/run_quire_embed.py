"""Quire itself, in process: `LLM.embed` of token ids."""

from __future__ import annotations

from typing import Any

from program import Run, serve


def load(settings: dict[str, Any]) -> tuple[Run, str]:
    from quire import LLM, __version__

    llm = LLM(
        settings["model"],
        runner="pooling",
        dtype=settings["dtype"],
        quantization=settings.get("quantization"),
        num_threads=settings["num_threads"],
        max_model_len=settings["max_model_len"],  # which may be more than its files have texts cut to
        max_num_batched_tokens=max(8192, settings["max_model_len"]),
    )

    def run(prompts: list[list[int]], output_lens: list[int]) -> None:
        outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False)
        assert len(outputs) == len(output_lens)

    return run, __version__


if __name__ == "__main__":
    serve(load)
