"""Modules that only Apertus has."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_models.families.apertus import XieluMLPSpec
from quire_models.layers.activations import activation
from quire_models.layers.mlp import MLP
from quire_models.layers.scope import Scope

__all__ = ["XIELU", "make_mlp"]


class XIELU:
    """x [..., I] -> like x: p x^2 + b x above zero, n (exp(min(x, eps)) - 1 - x) + b x below.

    p = softplus(alpha_p), n = b + softplus(alpha_n) (Huang & Schlag 2024, sec. 3).
    """

    def __init__(self, scope: Scope) -> None:
        self._parameters = {
            "alpha_p": scope.parameter("alpha_p", 1),
            "alpha_n": scope.parameter("alpha_n", 1),
            "beta": scope.parameter("beta"),
            "eps": scope.parameter("eps"),
        }
        self._expm1 = activation(scope, "expm1")
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        values = {name: parameter.take() for name, parameter in self._parameters.items()}
        self._beta, self._eps = values["beta"], values["eps"]
        self._above = F.softplus(values["alpha_p"])
        self._below = self._beta + F.softplus(values["alpha_n"])

    def __call__(self, x: Tensor) -> Tensor:
        above = self._above * x * x
        below = (self._expm1(torch.minimum(x, self._eps)) - x) * self._below
        return torch.where(x > 0, above, below) + self._beta * x


def make_mlp(spec: XieluMLPSpec, scope: Scope) -> MLP:
    """The feed-forward network of a layer, in the scope of the layer."""
    inner = scope / spec.name
    return MLP(spec, inner, act=XIELU(inner / "act_fn"))
