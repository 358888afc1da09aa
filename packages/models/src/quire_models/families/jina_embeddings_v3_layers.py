"""The network of Jina Embeddings v3 with the adapter of a task in its weights."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from quire_models.config import ModelConfig
from quire_models.families.jina_embeddings_v3 import TaskSpec
from quire_models.layers.encoder_only import EncoderOnly
from quire_models.layers.scope import Scope

__all__ = ["TaskEncoder"]

_PARTS = ("original", "0.lora_A", "0.lora_B")
"""Ends of the names of an adapted weight, and of its adapters of all tasks."""


class TaskEncoder(EncoderOnly):
    """An encoder whose weights are those of the checkpoint plus what the adapter of one task adds to them (LoRA, Hu et
    al. 2021, section 4.1)."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        assert isinstance(config.network, TaskSpec)
        self._task = config.network
        self._parts: dict[str, dict[str, Tensor]] = {}
        """Name of a weight -> those of its parts that were read, until all of them are."""

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """A tensor of the checkpoint as parameters: an adapted weight once its three parts were read."""
        stem, _, part = name.partition(".parametrizations.weight.")
        if part not in _PARTS:
            return super().checkpoint_tensors(name, tensor)
        parts = self._parts.setdefault(stem, {})
        parts[part] = tensor
        if len(parts) < len(_PARTS):
            return ()
        del self._parts[stem]
        return super().checkpoint_tensors(f"{stem}.weight", self._merged(stem, *(parts[each] for each in _PARTS)))

    def _merged(self, stem: str, weight: Tensor, lora_a: Tensor, lora_b: Tensor) -> Tensor:
        """weight + scale * B A of the task.

        Args:
            stem: Name of the weight's layer.
            weight: [out_features, in_features], or [tokens, size] of the table of tokens.
            lora_a: [tasks, rank, in_features], or [tasks, tokens, rank].
            lora_b: [tasks, out_features, rank], or [tasks, rank, size].
        """
        first, second = lora_b[self._task.task_index].float(), lora_a[self._task.task_index].float()
        if stem.endswith("embeddings"):
            first, second = second, first
        return (weight.float() + first @ second * self._task.lora_scale).to(weight.dtype)
