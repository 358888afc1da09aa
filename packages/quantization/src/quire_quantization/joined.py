"""Weights of several layers that take the same input as those of one layer with all of their outputs, and back.

Knows what the tensors are that linear methods and kernels make: of outputs, of blocks of 16 outputs that share memory,
or of inputs.

Shape legend: O outputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire_quantization.numbers import BLOCK_CONSTANTS, are_absent, ask

__all__ = ["BLOCK", "ROTATED", "join_weights", "split_weights"]

BLOCK = 16
"""Outputs that share memory in some forms: layers that are joined have multiples of it."""
_OF_INPUTS = frozenset({"input_scale", "order"})
ROTATED = "rotated"
"""Name among a layer's weights that says that its method rotates what it takes or gives."""


def join_weights(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor] | None:
    """The weights of one layer that gives what several give, one behind the other; a copy.

    Args:
        parts: Of each layer, as its kernel takes them; all of one kernel. Outputs are multiples of `BLOCK`. Scales of
            inputs are the same number.

    Returns:
        None where layers keep different forms, have blocks of different constants, or take inputs in an order.
    """
    first = parts[0]
    forms = [{name: (tensor.dtype, tensor.device, tensor.shape[1:]) for name, tensor in part.items()} for part in parts]
    if "order" in first or ROTATED in first or any(form != forms[0] for form in forms):
        return None
    shared = _shared(first)
    if "scale" in shared and any(part["scale"].shape != first["scale"].shape for part in parts):
        return None
    if "scale" in shared and not ask(
        BLOCK_CONSTANTS, are_absent() or all(torch.equal(part["scale"], first["scale"]) for part in parts)
    ):
        return None
    return {name: tensor if name in shared else torch.cat([part[name] for part in parts])
            for name, tensor in first.items()}  # fmt: skip


def split_weights(weights: dict[str, Tensor], sizes: Sequence[int]) -> list[dict[str, Tensor]]:
    """Views of a layer's weights: those of its first outputs, of the next, and so on.

    Args:
        sizes: Outputs of each part: multiples of `BLOCK`.
    """
    parts: list[dict[str, Tensor]] = [{} for _ in sizes]
    shared = _shared(weights)
    for name, tensor in weights.items():
        # Scales of groups are [O / 16, G, 16].
        rows = [size // BLOCK for size in sizes] if tensor.ndim == 3 else list(sizes)
        pieces = (tensor,) * len(sizes) if name in shared else tensor.split(rows)
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece
    return parts


def _shared(weights: dict[str, Tensor]) -> frozenset[str]:
    """Names of what all outputs have in common: of weights in blocks the header, too."""
    scale = weights.get("scale")
    in_blocks = weights["weight"].dtype == torch.uint8 and scale is not None and scale.ndim == 1
    return _OF_INPUTS | {"scale"} if in_blocks else _OF_INPUTS
