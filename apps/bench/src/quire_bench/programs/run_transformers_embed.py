"""A body of Transformers, and the mean of each text's hidden states, normalized."""

from __future__ import annotations

from typing import Any

from batches import padded_batches
from program import Run, serve


def load(settings: dict[str, Any]) -> tuple[Run, str]:
    import torch
    import transformers

    if settings["num_threads"]:
        torch.set_num_threads(settings["num_threads"])
    dtype = getattr(torch, settings["dtype"])
    model = transformers.AutoModel.from_pretrained(settings["model"], dtype=dtype).eval()
    if settings.get("quantization") in ("int8", "w8a8-g64"):  # it rounds inputs, too
        model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)

    @torch.inference_mode()
    def run(prompts: list[list[int]], output_lens: list[int]) -> None:
        for ids, mask in padded_batches(prompts):
            kept = torch.tensor(mask)
            hidden = model(input_ids=torch.tensor(ids), attention_mask=kept).last_hidden_state
            mean = (hidden * kept[..., None]).sum(1) / kept.sum(1, keepdim=True)
            torch.nn.functional.normalize(mean, dim=-1).float().numpy()

    return run, transformers.__version__


if __name__ == "__main__":
    serve(load)
