"""Quire itself, in process, answering messages with an image."""

from __future__ import annotations

from typing import Any

from picture import FIRST_PROMPT, message
from program import Run, check_lengths, serve


def load(settings: dict[str, Any]) -> tuple[Run, str]:
    from quire import LLM, SamplingParams, __version__

    block_size = 16
    llm = LLM(
        settings["model"],
        dtype=settings["dtype"],
        quantization=settings.get("quantization"),
        num_threads=settings["num_threads"],
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        block_size=block_size,
        num_gpu_blocks_override=-(-settings["num_kv_tokens"] // block_size) + settings["max_num_seqs"] + 1,
        enable_prefix_caching=False,
    )

    def run(prompts: list[Any], output_lens: list[int]) -> None:
        params = [
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in output_lens
        ]
        results = llm.chat([message(prompt) for prompt in prompts], params, use_tqdm=False)
        check_lengths([len(result.outputs[0].token_ids) for result in results], output_lens)

    return run, __version__


if __name__ == "__main__":
    serve(load, FIRST_PROMPT)
