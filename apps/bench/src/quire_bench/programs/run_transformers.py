"""Hugging Face `generate`, greedy, without an end token, in batches.

A batch is padded on the left to its longest prompt and runs to its longest output; tokens beyond what a request asked
for are not counted, neither as its own nor against it.
"""

from __future__ import annotations

from typing import Any

from program import Run, serve


def load(settings: dict[str, Any]) -> tuple[Run, str]:
    import torch
    import transformers

    if settings["num_threads"]:
        torch.set_num_threads(settings["num_threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=getattr(torch, settings["dtype"])
    ).eval()
    # Not the checkpoint's own: its penalties and temperatures are not applied by the others either.
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    batch_size = settings["max_num_seqs"]

    def generate(prompts: list[list[int]], output_lens: list[int]) -> None:
        width, longest = max(map(len, prompts)), max(output_lens)
        input_ids = torch.zeros((len(prompts), width), dtype=torch.long)
        mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        with torch.inference_mode():
            output = model.generate(input_ids=input_ids, attention_mask=mask, max_new_tokens=longest)
        if output.shape != (len(prompts), width + longest):
            raise RuntimeError(f"transformers stopped after {output.shape[1] - width} of {longest} tokens")

    def run(prompts: list[list[int]], output_lens: list[int]) -> None:
        for first in range(0, len(prompts), batch_size):
            generate(prompts[first : first + batch_size], output_lens[first : first + batch_size])

    return run, transformers.__version__


if __name__ == "__main__":
    serve(load)
