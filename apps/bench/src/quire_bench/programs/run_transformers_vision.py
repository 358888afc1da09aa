"""Hugging Face `generate` behind the checkpoint's processor, greedy, one message with an image after another."""

from __future__ import annotations

from typing import Any

from picture import FIRST_PROMPT, message
from program import Run, serve


def load(settings: dict[str, Any]) -> tuple[Run, str]:
    import torch
    import transformers

    if settings["num_threads"]:
        torch.set_num_threads(settings["num_threads"])
    dtype = getattr(torch, settings["dtype"])
    model = transformers.AutoModelForImageTextToText.from_pretrained(settings["model"], dtype=dtype).eval()
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    processor = transformers.AutoProcessor.from_pretrained(settings["model"])

    def answer(prompt: dict[str, Any], length: int) -> None:
        (turn,) = message(prompt)
        image, question = turn["content"]
        parts = [{"type": "image"}, question]
        text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
        inputs = processor(text=[text], images=[image["image_pil"]], return_tensors="pt").to(dtype)
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=length)
        generated = output.shape[1] - inputs["input_ids"].shape[1]
        if generated < length:
            raise RuntimeError(f"transformers stopped after {generated} of {length} tokens")

    def run(prompts: list[Any], output_lens: list[int]) -> None:
        for prompt, length in zip(prompts, output_lens, strict=True):
            answer(prompt, length)

    return run, transformers.__version__


if __name__ == "__main__":
    serve(load, FIRST_PROMPT)
