"""vLLM's offline engine, answering messages with an image."""

from __future__ import annotations

import os
from typing import Any

from picture import FIRST_PROMPT, message
from program import Run, check_lengths, serve


def load(settings: dict[str, Any]) -> tuple[Run, str]:
    # Whole GiB, read when vllm is imported.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, settings["num_kv_tokens"] >> 13)))
    import vllm

    llm = vllm.LLM(
        model=settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        enable_prefix_caching=False,
    )

    def run(prompts: list[Any], output_lens: list[int]) -> None:
        params = [
            vllm.SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in output_lens
        ]
        results = llm.chat([message(prompt) for prompt in prompts], params, use_tqdm=False)
        check_lengths([len(result.outputs[0].token_ids) for result in results], output_lens)

    return run, vllm.__version__


if __name__ == "__main__":
    serve(load, FIRST_PROMPT)
