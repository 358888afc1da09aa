"""A tiny Jina Embeddings v3 as its first checkpoints have it, with adapters of five tasks beside its weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.oracle import load_oracle, write_checkpoint

__all__ = ["TASKS", "JinaModel"]

TASKS = ("retrieval.query", "retrieval.passage", "separation", "classification", "text-matching")
RANK, ALPHA = 4, 2
_ADAPTED = ("mixer.Wqkv", "mixer.out_proj", "fc1", "fc2", "word_embeddings", "token_type_embeddings")
"""Ends of the names of layers that have adapters."""


class JinaModel:
    """A random network and its adapters, in a folder.

    Args:
        folder: Where it is written.
        fields: Fields of its configuration, over those of the parity case.
    """

    def __init__(self, folder: Path, **fields: Any) -> None:
        case = ENCODER_CASES["JinaEmbeddingsV3Model"]
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}
        case = dataclasses.replace(case, fields={**case.fields, **rope, **fields})
        self._oracle: Any = write_checkpoint(folder, "JinaEmbeddingsV3Model", case)
        values = json.loads((folder / "config.json").read_text())
        values.pop("rope_parameters")
        values |= {"architectures": ["XLMRobertaModel"], "position_embedding_type": "rotary"}
        values |= {"rotary_emb_base": 20000.0, "lora_alpha": ALPHA, "lora_rank": RANK, "lora_adaptations": list(TASKS)}
        (folder / "config.json").write_text(json.dumps(values))
        choose, tensors = torch.Generator().manual_seed(1), {}
        self._adapters: dict[str, tuple[Tensor, Tensor]] = {}
        """Name of a weight -> factors of what each task adds to it, [tasks, rows, rank] and [tasks, rank, columns]."""
        self._folder, self._stored = folder, load_file(folder / "model.safetensors")
        for name, tensor in self._stored.items():
            stem = name.removesuffix(".weight")
            if not name.endswith(".weight") or not stem.endswith(_ADAPTED):
                tensors[f"roberta.{name}"] = tensor
                continue
            shapes = (tensor.shape[0], RANK), (RANK, tensor.shape[1])
            left, right = (0.3 * torch.randn(len(TASKS), *shape, generator=choose) for shape in shapes)
            self._adapters[name] = left, right
            is_table = stem.endswith("embeddings")
            prefix = f"roberta.{stem}.parametrizations.weight"
            tensors |= {f"{prefix}.original": tensor, f"{prefix}.0.lora_A": left if is_table else right}
            tensors[f"{prefix}.0.lora_B"] = right if is_table else left
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def network(self, task: str | None) -> Any:
        """Transformers' network with the adapter of a task in its weights; None for none."""
        if task is None:
            return self._oracle
        merged, number = self._folder / task, TASKS.index(task)
        if not merged.exists():
            self._oracle.save_pretrained(merged)
            weights = dict(self._stored)
            for name, (left, right) in self._adapters.items():
                weights[name] = weights[name] + ALPHA / RANK * left[number] @ right[number]
            save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
        return load_oracle(merged)
