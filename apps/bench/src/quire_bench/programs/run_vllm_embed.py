"""vLLM's build for processors: `LLM.embed` of token ids."""

from __future__ import annotations

from typing import Any

from program import Run, serve


def load(settings: dict[str, Any]) -> tuple[Run, str]:
    import vllm

    llm = vllm.LLM(
        model=settings["model"],
        runner="pooling",
        dtype=settings["dtype"],
        max_model_len=settings["max_model_len"],
        enforce_eager=True,
        skip_tokenizer_init=True,
    )

    def run(prompts: list[list[int]], output_lens: list[int]) -> None:
        outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False)
        assert len(outputs) == len(output_lens)

    return run, str(vllm.__version__)


if __name__ == "__main__":
    serve(load)
