"""The network of Jina Embeddings v3 with the adapter of a task in its weights, or those of all tasks beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from quire_attention import EncoderBatch
from quire_interfaces import CheckpointError, RequestError
from quire_lora import AdapterSlots
from quire_lora.adapter import Adapter, LinearAdapter, TableAdapter
from quire_models.config import ModelConfig
from quire_models.families.jina_embeddings_v3 import TaskSpec
from quire_models.layers.encoder_only import EncoderOnly
from quire_models.layers.scope import Scope

__all__ = ["TaskEncoder"]

_TABLES = ("word_embeddings", "token_type_embeddings")
"""Ends of the names of tables of embeddings."""
_PARTS = ("original", "0.lora_A", "0.lora_B")
"""Ends of the names of an adapted weight, and of its adapters of all tasks."""


class TaskEncoder(EncoderOnly):
    """An encoder whose weights are those of the checkpoint plus what the adapter of a task adds to them (LoRA, Hu et
    al. 2021, section 4.1): of one task for all texts, or of the task that is in the slot of a text's tokens
    (`EncoderBatch.lora`)."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        assert isinstance(config.network, TaskSpec)
        self._task = config.network
        if self._task.task_index is None:
            slots = AdapterSlots(self._task.num_tasks, self._task.lora_rank, scope.dtype, scope.device)
            scope = dataclasses.replace(scope, adapters=slots)
        super().__init__(config, scope)
        self._parts: dict[str, dict[str, Tensor]] = {}
        """Name of a weight -> those of its parts that were read, until all of them are."""
        self._linear_adapters: list[dict[str, LinearAdapter]] = [{} for _ in range(self._task.num_tasks)]
        """Of each task, name of a layer -> its adapter, until they are in their slots."""
        self._table_factors: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        """(task, name of a table of embeddings) -> its adapter, until it is in its slot."""
        self._has_adapters = False
        if self._task.task_index is None:
            scope.when_loaded(self._place)

    def encode_batch(self, batch: EncoderBatch) -> Tensor:
        """See `EncoderOnly.encode_batch`. Raises RequestError where a text has a task and the files no adapters."""
        if batch.lora is not None and not self._has_adapters:
            raise RequestError(
                "config.json names tasks (lora_adaptations), and the weights have no adapters of them; leave task out",
                param="embedding_task",
            )
        return super().encode_batch(batch)

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
        weight, lora_a, lora_b = (parts[each] for each in _PARTS)
        index = self._task.task_index
        if index is not None:
            return super().checkpoint_tensors(f"{stem}.weight", self._merged(stem, index, weight, lora_a, lora_b))
        for task in range(self._task.num_tasks):
            self._keep(stem, task, lora_a[task].float(), lora_b[task].float() * self._task.lora_scale)
        return super().checkpoint_tensors(f"{stem}.weight", weight)

    def _merged(self, stem: str, task: int, weight: Tensor, lora_a: Tensor, lora_b: Tensor) -> Tensor:
        """weight + scale * B A of the task.

        Args:
            stem: Name of the weight's layer.
            task: Its number.
            weight: [out_features, in_features], or [tokens, size] of the table of tokens.
            lora_a: [tasks, rank, in_features], or [tasks, tokens, rank].
            lora_b: [tasks, out_features, rank], or [tasks, rank, size].
        """
        first, second = lora_b[task].float(), lora_a[task].float()
        if stem.endswith("embeddings"):
            first, second = second, first
        return (weight.float() + first @ second * self._task.lora_scale).to(weight.dtype)

    def _keep(self, stem: str, task: int, lora_a: Tensor, lora_b: Tensor) -> None:
        """Take what a task's adapter adds to a weight, of which the network may have made several layers.

        Args:
            stem: Name of the weight's layer.
            task: Its number.
            lora_a: [rank, in_features], or [tokens, rank] of a table.
            lora_b: [out_features, rank], or [rank, size] of a table, scaling included.
        """
        slots = self.adapters
        assert slots is not None
        for name, part in super().checkpoint_tensors(f"{stem}.weight", lora_b):
            layer = name.removesuffix(".weight")
            if layer in slots.linears:
                self._linear_adapters[task][layer] = LinearAdapter(a=lora_a.to(slots.dtype), b=part.T.to(slots.dtype))
        if stem.endswith(_TABLES):
            self._table_factors[task, stem.rpartition(".")[2]] = lora_a, lora_b

    def _place(self) -> None:
        """Put the adapter of each task into its slot."""
        slots = self.adapters
        assert slots is not None
        self._has_adapters = any(self._linear_adapters)
        for task, linears in enumerate(self._linear_adapters):
            tables = [self._table_factors[task, name] for name in _TABLES if (task, name) in self._table_factors]
            embedding = None if not tables else self._table_adapter(tables)
            slots.place(task, str(task), Adapter(linears=linears, embedding=embedding))
        self._linear_adapters.clear()
        self._table_factors.clear()

    def _table_adapter(self, tables: Sequence[tuple[Tensor, Tensor]]) -> TableAdapter:
        """What is added to the embeddings of tokens, (a [rows, rank], b [rank, size]) of each table: the row of the one
        type that tokens have is the same for all."""
        (a, b), *types = tables
        for type_a, type_b in types:
            if len(type_a) > 1:
                raise CheckpointError("adapters of the embeddings of several token types are not supported")
            a, b = torch.cat([a, type_a.expand(len(a), -1)], dim=1), torch.cat([b, type_b])
        return TableAdapter(a=a.to(self.dtype), b=b.to(self.dtype))
