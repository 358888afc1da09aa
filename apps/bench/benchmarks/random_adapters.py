"""Random adapters for the benchmarks of this folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire import LLM

__all__ = ["write_adapter"]


def write_adapter(llm: LLM, folder: Path, rank: int, seed: int) -> None:
    """A random adapter of the engine's network, in PEFT's layout, for every matrix outside of routed experts."""
    generator = torch.Generator().manual_seed(seed)
    slots = llm.engine.core.parts.adapters._slots  # type: ignore[union-attr]
    tensors = {}
    for name, site in slots.linears.items():
        if site.expert is not None:
            continue
        outputs, inputs = site.shape
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            random = torch.randn(*shape, generator=generator) * 0.02
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = random.to(slots.dtype)
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
