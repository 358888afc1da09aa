"""A network of two layers that registers with slots, and adapters for it in PEFT's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from quire_lora import AdapterSlots

HIDDEN, VOCAB = 6, 11
SHAPES = {f"model.layers.{layer}.{name}_proj": (out, HIDDEN) for layer in (0, 1) for name, out in (("q", 4), ("k", 2))}


def make_slots(
    num_slots: int = 2, max_rank: int = 4, dtype: torch.dtype = torch.float32, lora_dtype: str = "auto"
) -> AdapterSlots:
    slots = AdapterSlots(num_slots, max_rank, dtype, torch.device("cpu"), lora_dtype)
    slots.embedding, slots.lm_head = ("model.embed_tokens", (VOCAB, HIDDEN)), ("lm_head", (VOCAB, HIDDEN))
    for name, (outputs, inputs) in SHAPES.items():
        weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
        slots.linear(name, outputs, inputs, lambda weight=weight, bias=bias: (weight, bias))
    return slots


def tensors_of(names: Any = SHAPES, rank: int = 2) -> dict[str, Tensor]:
    found = {}
    for name in names:
        outputs, inputs = SHAPES[name]
        found[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inputs)
        found[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, rank)
    return found


def write(folder: Path, tensors: dict[str, Tensor], **fields: Any) -> Path:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "k_proj"], **fields}
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
