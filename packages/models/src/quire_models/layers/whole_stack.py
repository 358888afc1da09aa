"""The layers of all pipeline stages as data, without their numbers: what a network's layers are computed by, and with
what roundings, follows from all of them, and each stage has some."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire_distributed import Collectives
from quire_ops import DecoderLayerWeights, NormWeights

__all__ = ["gather_layers"]


def gather_layers(
    group: Collectives, layers: Sequence[DecoderLayerWeights | None], norm: NormWeights | None
) -> tuple[list[DecoderLayerWeights | None], NormWeights | None]:
    """The layers of all stages in their order, and the norm behind the last; every stage calls this. Tensors are on
    device "meta": shapes and dtypes, no numbers.

    Args:
        group: The stages.
        layers: Those of this stage; None for one that is not such data.
        norm: The norm behind the last stage's; None on others.
    """
    data = torch.frombuffer(bytearray(pickle.dumps(_without_numbers((list(layers), norm)))), dtype=torch.uint8)
    lengths = group.all_gather(torch.tensor([len(data)]), dim=0).tolist()
    pieces = group.all_gather(data, dim=0, sizes=lengths).split(lengths)
    parts = [pickle.loads(piece.numpy().tobytes()) for piece in pieces]
    return [layer for part, _ in parts for layer in part], parts[-1][1]


def _without_numbers(value: Any) -> Any:
    """A record with its tensors on device "meta"."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: _without_numbers(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    if isinstance(value, list | tuple):
        parts = map(_without_numbers, value)
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
