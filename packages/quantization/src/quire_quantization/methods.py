"""Linear methods: how a linear layer keeps its weight and multiplies with it.

Knows weights and ops; does not know layers, checkpoints or networks. A method is stateless; the layer owns the tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire_interfaces import ConfigError, LinearMethod
from quire_ops import OpRequest, bind

__all__ = ["Int8WeightOnlyLinear", "PlainLinear", "linear_method", "linear_method_names"]


_ROWS = 4096


class PlainLinear:
    """The weight as loaded."""

    name = "plain"

    def __init__(self, request: OpRequest) -> None:
        self._linear = bind("linear", request)

    def make_weights(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
        """Keeps `weight` [out_features, in_features] itself, without a copy."""
        return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}

    def apply(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        """x [N, in_features] -> [N, out_features]."""
        out: Tensor = self._linear(x, weights["weight"], weights.get("bias"))
        return out

    def weight_bytes(self, out_features: int, in_features: int, dtype_bytes: int) -> int:
        """Bytes of the weight as loaded."""
        return out_features * in_features * dtype_bytes


class Int8WeightOnlyLinear:
    """The weight in int8 with one symmetric scale per output, max |weight[o]| / 127; activations as they are.

    Rounded to nearest: absmax quantization of each row (LLM.int8(), Dettmers et al. 2022, sec. 2.1).
    """

    name = "int8"

    def __init__(self, request: OpRequest) -> None:
        self._linear = bind("int8_linear", request)

    def make_weights(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
        """weight [out_features, in_features] float -> int8 of the same shape, and scale [out_features] in its dtype."""
        scale = (weight.abs().amax(dim=1).float() / 127.0).to(weight.dtype)
        # A row of zeros (or one so small that its scale is rounded to zero) is kept as zeros.
        divisor = torch.where(scale == 0, torch.ones_like(scale), scale).float()[:, None]
        quantized = torch.empty_like(weight, dtype=torch.int8)
        for begin in range(0, weight.shape[0], _ROWS):  # bounds the wide copies
            rows = slice(begin, begin + _ROWS)
            quantized[rows] = torch.round(weight[rows].float() / divisor[rows]).clamp_(-127, 127).to(torch.int8)
        weights = {"weight": quantized, "scale": scale}
        if bias is not None:
            weights["bias"] = bias
        return weights

    def apply(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        """x [N, in_features] -> [N, out_features]."""
        out: Tensor = self._linear(x, weights["weight"], weights["scale"], weights.get("bias"))
        return out

    def weight_bytes(self, out_features: int, in_features: int, dtype_bytes: int) -> int:
        """One byte per weight and one scale per output."""
        return out_features * in_features + out_features * dtype_bytes


_METHODS: dict[str, Callable[[OpRequest], LinearMethod]] = {
    "plain": PlainLinear,
    "int8": Int8WeightOnlyLinear,
}


def linear_method_names() -> tuple[str, ...]:
    """Names that `linear_method` takes."""
    return tuple(_METHODS)


def linear_method(name: str, request: OpRequest) -> LinearMethod:
    """The method called `name`, its ops bound for `request`.

    Raises:
        ConfigError: There is no such method; the message lists the choices.
    """
    if name not in _METHODS:
        raise ConfigError(
            f"there is no linear method {name!r}; choose one of {', '.join(_METHODS)} "
            "('plain' keeps the weights as the checkpoint has them)",
            field="quantization",
        )
    return _METHODS[name](request)
