"""Experts on their way between ranks: the weights of some linear layers, in whatever form their method keeps them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire_distributed import Collectives
from quire_models.expert_placement import Move
from quire_models.layers.linear import Linear
from quire_ops import LinearWeights

__all__ = ["move_linears"]

FIELDS = tuple(name for name in LinearWeights._fields if name not in ("lora", "rank_sizes"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.int16, torch.int32,
          torch.float8_e4m3fn, torch.float8_e5m2)  # fmt: skip
_MAX_DIM = 4


def move_linears(
    group: Collectives, moves: Sequence[Move], roles: Sequence[Sequence[Linear]], own: Sequence[int]
) -> None:
    """Give the layers of some slots the weights that layers of other ranks have. Every rank calls it alike.

    Args:
        roles: Layers of each slot of this rank, for each matrix that an expert has.
        own: The expert in each slot, before.
    """
    received: list[tuple[int, list[dict[str, Tensor]]]] = []
    for move in moves:
        if move.source == group.rank:
            slot = own.index(move.expert)
            for layers in roles:
                sent = layers[slot].stack_weights()
                assert sent is not None
                _send(group, sent, move.target)
        elif move.target == group.rank:
            device = next(iter(_tensors_of(roles[0][0]))).device
            received.append((move.slot, [_receive(group, move.source, device) for _ in roles]))
    # Only now: a slot that gets another expert may have been sent before.
    for slot, weights in received:
        for layers, tensors in zip(roles, weights, strict=True):
            layers[slot].keep(tensors)


def _send(group: Collectives, weights: LinearWeights, to: int) -> None:
    header = torch.full((len(FIELDS), 2 + _MAX_DIM), -1)
    tensors = [getattr(weights, name) for name in FIELDS]
    for row, tensor in zip(header, tensors, strict=True):
        if tensor is not None:
            row[: 2 + tensor.ndim] = torch.tensor((DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape))
    group.send(header, to)
    for tensor in tensors:
        if tensor is not None:
            group.send(tensor, to)


def _tensors_of(layer: Linear) -> list[Tensor]:
    """What a layer keeps."""
    weights = layer.stack_weights()
    assert weights is not None
    return [tensor for name in FIELDS if (tensor := getattr(weights, name)) is not None]


def _receive(group: Collectives, from_: int, device: torch.device) -> dict[str, Tensor]:
    header = group.recv(torch.full((len(FIELDS), 2 + _MAX_DIM), -1), from_).tolist()
    weights = {}
    for name, (dtype, dim, *shape) in zip(FIELDS, header, strict=True):
        if dtype >= 0:
            weights[name] = group.recv(torch.empty(shape[:dim], dtype=DTYPES[dtype], device=device), from_)
    return weights
