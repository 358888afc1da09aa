"""`NativeTowers`: a described tower with its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from quire_attention import AttentionBackend
from quire_interfaces import CheckpointError, ConfigError, Modality
from quire_models.build import class_of
from quire_models.composite import LanguageNames
from quire_models.layers.fused import named_tensors
from quire_models.layers.scope import Packed, Parameter, Scope
from quire_models.media_spec import MediaSpec
from quire_models.weights import fill_parameters, fill_with_dummies
from quire_ops import OpRequest
from quire_quantization import linear_method

__all__ = ["NativeTowers", "load_native_towers"]


class Tower(Protocol):
    """An encoder with its connector."""

    def encode(self, modality: Modality, items: list[dict[str, Tensor]]) -> list[Tensor]:
        """Embeddings of each item, from its arrays under the names of the processor's outputs, floating-point ones in
        the compute dtype. ValueError: an item has a shape that the tower does not take."""


class NativeTowers:
    """The tower of a network, with its connector."""

    def __init__(self, spec: MediaSpec, scope: Scope) -> None:
        assert spec.tower is not None
        self._architecture, self._tower_spec = spec.architecture, spec.tower
        self._scope = scope
        self._tower: Tower = class_of(spec.tower.built_by)(spec.tower, scope)
        self._num_parameters = spec.num_parameters

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""
        return self._scope.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._scope.device

    @property
    def parameters(self) -> list[Parameter]:
        """What the checkpoint has to bring."""
        return self._scope.parameters

    @property
    def packs(self) -> dict[str, Packed]:
        """What the checkpoint may bring in the place of parameters, by its name there."""
        return self._scope.packs

    @property
    def num_parameters(self) -> int:
        """Weights of the tower and of its connector in the checkpoint's files; 0 where there are none."""
        return self._num_parameters

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """A tensor of the checkpoint that is not the language model's, as parameters; there may be others, which the
        tower does not need."""
        name = name.removeprefix("vlm.").removeprefix("thinker.").removeprefix("model.")
        return named_tensors(self._tower_spec.checkpoint, "lm_head", name, tensor)

    def finish_loading(self, after_each: Callable[[], None] = lambda: None) -> None:
        """Give the loaded parameters to their layers. Once, after all parameters have their tensor."""
        for finish in self._scope.finishers:
            finish()
            after_each()
        self._scope.finishers.clear()

    @torch.inference_mode()
    def encode(self, modality: str, items: list[dict[str, Tensor]]) -> list[Tensor]:
        """Embeddings of each item, [num_embeds, width].

        Args:
            modality: A value of `quire_interfaces.Modality`.
            items: Arrays of each item under the names of the processor's outputs.

        Raises:
            ConfigError: There is no tower for this modality.
            ValueError: An item has a shape that the tower does not take.
        """
        kind = Modality(modality)
        if kind not in self._tower_spec.inputs:
            names = ", ".join(self._tower_spec.inputs)
            raise ConfigError(f"{self._architecture} takes {names}, and no {modality}", field="media")
        placed = [{name: self._placed(value) for name, value in item.items()} for item in items]
        return self._tower.encode(kind, placed) if placed else []

    def _placed(self, value: Tensor) -> Tensor:
        return value.to(self.device, self.dtype if value.is_floating_point() else value.dtype)


def load_native_towers(
    spec: MediaSpec,
    names: LanguageNames,
    folder: str | Path,
    dtype: torch.dtype,
    device: torch.device,
    attention_backend: AttentionBackend,
    *,
    dummy: bool = False,
) -> NativeTowers:
    """The described tower of a checkpoint, with its weights.

    Args:
        spec: Its `tower` is not None.
        names: Tell tensors of the language model.
        attention_backend: The language model's, which the tower does not call.
        dummy: Random weights, for which the folder needs no files.

    Raises:
        CheckpointError: Weights cannot be read, have other shapes, or are not there, and are named.
    """
    request = OpRequest(device=device.type, dtype=dtype)
    plain = linear_method("plain", request)
    scope = Scope(
        dtype=dtype,
        device=device,
        linear_method=linear_method(spec.linear_method, request),
        head_method=plain,
        plain_method=plain,
        attention_backend=attention_backend,
        joins_products=device.type != "cpu",
    )
    towers = NativeTowers(spec, scope)
    if dummy:
        fill_with_dummies(towers)
        towers.finish_loading()
        return towers
    filling = fill_parameters(
        towers,
        Path(folder),
        lambda name, tensor: () if names(name) is not None else towers.checkpoint_tensors(name, tensor),
    )
    if filling.missing:
        missing = sorted(filling.missing)
        raise CheckpointError(f"{folder} lacks {len(missing)} weights of its towers: {', '.join(missing)}")
    if filling.wrong:
        raise CheckpointError(f"the towers in {folder} do not fit its config.json: {'; '.join(filling.wrong)}")
    towers.finish_loading(filling.trim)
    return towers
