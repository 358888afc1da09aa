"""Functions of pooled vectors that give a vector the same bits whatever vectors stand beside it.

Shape legend: N vectors of D numbers, float32. torch's own sums over a dimension, and its exponentials, follow where a
number stands among all; what is here is made of operations that IEEE 754 rounds in one way, or goes through an op whose
backend promises it, or takes vector by vector.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire_ops import OpRequest, op_table, ops
from quire_pooling.spec import Activation

__all__ = ["Activate", "activate_with", "normalize"]

Activate = Callable[[Tensor, Activation], Tensor]
"""A function of each vector of x [N, D], by its name -> [N, D]."""
MIN_LENGTH = 1e-12
"""A shorter vector is divided by this, as `torch.nn.functional.normalize` does."""


def normalize(x: Tensor) -> Tensor:
    """Each vector of x [..., D] divided by its Euclidean length."""
    length = _fold(x * x).sqrt().clamp_(min=MIN_LENGTH)
    return x / length


def _fold(x: Tensor) -> Tensor:
    """Sums over the last dimension of x [..., D], which it overwrites -> [..., 1]: the upper half is added to the lower
    one until one number is left."""
    width = x.shape[-1]
    while width > 1:
        half = 1 << (width - 1).bit_length() - 1
        x[..., : width - half] += x[..., half:width]
        width = half
    return x[..., :1]


def activate_with(device: torch.device) -> Activate:
    """The activations of pooled vectors on `device`."""
    backend = op_table().choose(ops.activation, OpRequest(device=device.type, dtype=torch.float32))
    by_vector = device.type == "cpu" and not backend.batch_invariant

    def activate(x: Tensor, name: Activation) -> Tensor:
        if name == "identity":
            return x
        if name == "relu":
            return x.relu()
        if name in ("softmax", "log1p_relu", "log1p_log1p_relu"):
            return _one_by_one(_FUNCTIONS[name], x)
        if by_vector:
            return _one_by_one(lambda vector: backend.function(vector.clone(), name), x)
        return backend.function(x.clone(memory_format=torch.contiguous_format), name)  # which may write over it

    return activate


def _one_by_one(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of each vector alone where torch's depends on how many there are."""
    if x.device.type != "cpu" or len(x) < 2:
        return function(x)
    return torch.cat([function(vector) for vector in x.split(1)])


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(dim=-1),
    "log1p_relu": lambda x: x.relu().log1p_(),
    "log1p_log1p_relu": lambda x: x.relu().log1p_().log1p_(),
}
