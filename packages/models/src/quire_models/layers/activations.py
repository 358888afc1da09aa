"""Functions of single numbers between products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from quire_models.layers.scope import Scope
from quire_ops import GATED_ACTIVATIONS, ops

__all__ = ["activation", "gated_activation"]

_EXACT: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "relu2": lambda x: F.relu(x).square()}
"""Activations whose operations IEEE 754 rounds in one way, whichever backend computes them."""

_QUICK_GELU = 1.702


def activation(scope: Scope, name: str) -> Callable[[Tensor], Tensor]:
    """x [...] -> like x, which it may write over.

    Args:
        scope: Scope of the layer that computes the function.
        name: One of op `activation`, "relu" or "relu2", its square. The right-hand sides of
            `quire_models.config_fields.HIDDEN_ACTS` are among them. "quick_gelu" is x * sigmoid(1.702 * x) (Hendrycks &
            Gimpel 2016, sec. 2).
    """
    if name == "quick_gelu":
        silu = partial(scope.op(ops.activation), name="silu")
        return lambda x: silu(x.mul_(_QUICK_GELU)).div_(_QUICK_GELU)
    return _EXACT[name] if name in _EXACT else partial(scope.op(ops.activation), name=name)


def gated_activation(scope: Scope, name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """(gate, up), both [...] -> act(gate) * up, by one op where there is one.

    Args:
        scope: Of the layer that computes it.
        name: See `activation`.
    """
    if name in GATED_ACTIVATIONS:
        return scope.op(GATED_ACTIVATIONS[name])
    act = activation(scope, name)
    return lambda gate, up: act(gate) * up
