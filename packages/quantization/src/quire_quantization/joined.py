"""Weights of several layers that take the same input as those of one layer with all of their outputs, and back.

Knows what the tensors are that linear methods and kernels make: of outputs, of blocks of 16 outputs that share memory,
or of inputs.

Shape legend: O outputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["BLOCK", "join_weights", "split_weights"]

BLOCK = 16
"""Outputs that share memory in some forms: layers that are joined have multiples of it."""
_OF_INPUTS = frozenset({"input_scale", "order"})


def join_weights(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor] | None:
    """The weights of one layer that gives what several give, one behind the other; a copy.

    Args:
        parts: Of each layer, as its kernel takes them; all of one kernel. Outputs are multiples of `BLOCK`. Scales of
            inputs are the same number.

    Returns:
        None where layers keep different forms, are in blocks, or take inputs in an order.
    """
    first = parts[0]
    forms = [{name: (tensor.dtype, tensor.device, tensor.shape[1:]) for name, tensor in part.items()} for part in parts]
    in_blocks = first["weight"].dtype == torch.uint8 and first["scale"].ndim == 1
    if "order" in first or in_blocks or any(form != forms[0] for form in forms):
        return None
    return {name: tensor if name in _OF_INPUTS else torch.cat([part[name] for part in parts])
            for name, tensor in first.items()}  # fmt: skip


def split_weights(weights: dict[str, Tensor], sizes: Sequence[int]) -> list[dict[str, Tensor]]:
    """Views of a layer's weights: those of its first outputs, of the next, and so on.

    Args:
        sizes: Outputs of each part: multiples of `BLOCK`.
    """
    parts: list[dict[str, Tensor]] = [{} for _ in sizes]
    for name, tensor in weights.items():
        # Scales of groups are [O / 16, G, 16].
        rows = [size // BLOCK for size in sizes] if tensor.ndim == 3 else list(sizes)
        pieces = (tensor,) * len(sizes) if name in _OF_INPUTS else tensor.split(rows)
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece
    return parts
