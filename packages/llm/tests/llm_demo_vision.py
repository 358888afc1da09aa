"""The demo model inside a LLaVA: the language half is what it was, the tower and the projector are random."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

__all__ = ["PLACEHOLDER", "write_with_tower"]

PLACEHOLDER = "<|endoftext|>"
"""Image token: one of the vocabulary that no text of the demo model has."""
TOWER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8, "projection_dim": 32,
}  # fmt: skip


def write_with_tower(folder: Path, checkpoint: Path) -> Path:
    """A LLaVA with this language model, 16 embeddings per image, and its processor.

    Args:
        folder: Made.
        checkpoint: A form of the demo model.

    Returns:
        `folder`.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        checkpoint, extra_special_tokens={"image_token": PLACEHOLDER}
    )
    text = json.loads((checkpoint / "config.json").read_text())
    token_id = tokenizer.convert_tokens_to_ids(PLACEHOLDER)
    tower = transformers.CLIPVisionConfig(**TOWER)
    config = transformers.LlavaConfig(
        vision_config=tower,
        text_config=transformers.LlamaConfig(num_hidden_layers=0, hidden_size=text["hidden_size"], vocab_size=8),
        image_token_index=token_id,
        vision_feature_layer=-2,
    )
    torch.manual_seed(7)
    network = transformers.LlavaForConditionalGeneration(config).bfloat16()
    tensors = {
        name: tensor for name, tensor in network.state_dict().items() if not name.startswith(("model.language", "lm_"))
    }
    tensors = {name.removeprefix("model."): tensor.contiguous() for name, tensor in tensors.items()}
    for name in ("weight", "bias"):  # of the size of the embeddings of tokens, so that answers depend on images
        tensors[f"multi_modal_projector.linear_2.{name}"] *= 20
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        tensors[f"language_model.{name}"] = tensor
    square = {"height": 32, "width": 32}
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=square),
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
        image_token=PLACEHOLDER,
    )
    processor.save_pretrained(folder)
    values = {**config.to_dict(), "text_config": text, "tie_word_embeddings": text.get("tie_word_embeddings", False)}
    values |= {"architectures": ["LlavaForConditionalGeneration"], "eos_token_id": text["eos_token_id"]}
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "generation_config.json").write_bytes((checkpoint / "generation_config.json").read_bytes())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
