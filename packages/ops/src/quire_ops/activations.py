"""Ops on each number of a tensor: activation functions, and the gates of feed-forward networks.

Shape legend: N rows, I numbers of a row. Results have the dtype of `x`, or of `gate` and `up`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_ops.op import op
from quire_ops.table import torch_backend_for

__all__ = [
    "GATED_ACTIVATIONS",
    "activation",
    "gelu_and_mul",
    "sigmoid_and_mul",
    "silu_and_mul",
    "torch_gelu_and_mul",
    "torch_silu_and_mul",
]


@op
def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gate * sigmoid(gate) * up (SwiGLU, Shazeer 2020); gate, up [N, I] -> [N, I]. May write over gate."""
    wide = gate.double()
    return (wide * torch.sigmoid(wide) * up.double()).to(gate.dtype)


@op
def gelu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh approximation (GEGLU, Shazeer 2020); gate, up [N, I] -> [N, I]. May write over
    gate."""
    wide = gate.double()
    inner = math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide**3)
    return (0.5 * wide * (1.0 + torch.tanh(inner)) * up.double()).to(gate.dtype)


GATED_ACTIVATIONS = {"silu": silu_and_mul, "gelu": gelu_and_mul}
"""Activation of a gated feed-forward network, by its name in configurations -> the op that gates with it."""


@op
def sigmoid_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """sigmoid(gate) * up; gate [N, I], or [N, 1] for all of a row; up [N, I] -> [N, I]. May write over gate."""
    return (torch.sigmoid(gate.double()) * up.double()).to(gate.dtype)


@op
def activation(x: Tensor, name: str) -> Tensor:
    """A function of each number of x [...], by its name: silu, gelu (the tanh approximation), gelu_erf (Hendrycks &
    Gimpel 2016, sec. 2), sigmoid, tanh, expm1. May write over x."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": lambda x: x / (1.0 + torch.exp(-x)),
        "gelu": lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))),
        "gelu_erf": lambda x: 0.5 * x * torch.erfc(-x / math.sqrt(2.0)),
        "sigmoid": lambda x: 1.0 / (1.0 + torch.exp(-x)),
        "tanh": torch.tanh,
        "expm1": torch.expm1,
    }
    return functions[name](x.double()).to(x.dtype)


@torch_backend_for(silu_and_mul)
def torch_silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Written over `gate`."""
    return F.silu(gate, inplace=True).mul_(up)


@torch_backend_for(gelu_and_mul)
def torch_gelu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Not written over `gate`."""
    return F.gelu(gate, approximate="tanh").mul_(up)


@torch_backend_for(sigmoid_and_mul)
def _torch_sigmoid_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Written over `gate` where that is as large as `up`."""
    gate = gate.sigmoid_()
    return gate.mul_(up) if gate.shape == up.shape else gate * up


def _gelu_erf(x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return F.gelu(x)
    # With AVX-512, torch 2.15 asks oneDNN, which errs by 1e-4 of small results, and finds no number at infinity.
    wide = x.float()
    return (wide * (1.0 + torch.erf(wide * math.sqrt(0.5))).mul_(0.5)).to(x.dtype)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": partial(F.gelu, approximate="tanh"),
    "gelu_erf": _gelu_erf,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "expm1": torch.expm1,
}


@torch_backend_for(activation)
def _torch_activation(x: Tensor, name: str) -> Tensor:
    return _ACTIVATIONS[name](x)
