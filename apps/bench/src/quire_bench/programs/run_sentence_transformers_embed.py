"""sentence-transformers: the modules of its model on token ids, as `encode` runs them behind its tokenizer."""

from __future__ import annotations

from typing import Any

from batches import padded_batches
from program import Run, serve


def load(settings: dict[str, Any]) -> tuple[Run, str]:
    import sentence_transformers
    import torch

    if settings["num_threads"]:
        torch.set_num_threads(settings["num_threads"])
    dtype = getattr(torch, settings["dtype"])
    model = sentence_transformers.SentenceTransformer(settings["model"], device="cpu", model_kwargs={"dtype": dtype})
    model.eval()

    @torch.inference_mode()
    def run(prompts: list[list[int]], output_lens: list[int]) -> None:
        for ids, mask in padded_batches(prompts):
            out = model({"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)})
            torch.nn.functional.normalize(out["sentence_embedding"], dim=-1).float().numpy()

    return run, sentence_transformers.__version__


if __name__ == "__main__":
    serve(load)
