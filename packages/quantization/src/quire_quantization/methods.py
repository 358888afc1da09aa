"""Linear methods: how a linear layer keeps its weight and multiplies with it.

Knows weights and ops; does not know layers, checkpoints or networks. A method is stateless; the layer owns the tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from quire_interfaces import ConfigError, LinearMethod
from quire_ops import OpRequest, bind
from torch import Tensor

__all__ = ["Int8WeightOnlyLinear", "PlainLinear", "linear_method", "linear_method_names"]


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
    """The weight in int8 with one symmetric scale per output: scale[o] = max |weight[o]| / 127, activations as they are.

    Rounded to nearest (LLM.int8(), Dettmers et al. 2022, sec. 2.1, row-wise absmax).
    """

    name = "int8"

    def __init__(self, request: OpRequest) -> None:
        self._linear = bind("int8_linear", request)

    def make_weights(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
        """weight [out_features, in_features] float -> int8 of the same shape, and scale [out_features] in its dtype."""
        scale = (weight.float().abs().amax(dim=1) / 127.0).clamp_min(torch.finfo(torch.float32).tiny)
        scale = scale.to(weight.dtype)
        quantized = torch.round(weight.float() / scale.float()[:, None]).clamp_(-127, 127).to(torch.int8)
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
