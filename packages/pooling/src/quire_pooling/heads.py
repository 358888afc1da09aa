"""The chain of small layers that `PoolingHeadSpec` describes, in float32.

A vector's result is the same bits whatever vectors stand beside it: where the backend of op `linear` promises that,
all vectors of a step go through together, else (torch's own products on a CPU) the vectors of each text for themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire_interfaces import CheckpointError
from quire_ops import OpRequest, op_table, ops
from quire_pooling.activations import activate_with, normalize
from quire_pooling.spec import DenseSpec, LayerNormSpec, NormalizeSpec, PoolingHeadSpec

__all__ = ["PoolingHead"]


class PoolingHead:
    """A head with its weights."""

    def __init__(self, spec: PoolingHeadSpec, weights: Mapping[str, Tensor], device: torch.device) -> None:
        """Args:
        spec: The layers.
        weights: Tensors by name; those of `spec` are taken, as float32 on `device`.
        device: Where the vectors are.

        Raises:
            CheckpointError: A tensor is missing or has another shape.
        """
        self.spec = spec
        request = OpRequest(device=device.type, dtype=torch.float32)
        table = op_table()
        linear = table.choose(ops.linear, request)
        self._linear = linear.function
        self._layer_norm = table.bind(ops.layer_norm, request)
        self._activate = activate_with(device)
        self.is_invariant = device.type != "cpu" or linear.batch_invariant
        """Vectors of several texts may go through together."""
        self._weights: dict[str, Tensor] = {}
        for name, shape in spec.shapes().items():
            tensor = weights.get(name)
            if tensor is None:
                raise CheckpointError(f"the pooler needs tensor {name}, which the checkpoint does not have")
            if tuple(tensor.shape) != shape:
                raise CheckpointError(f"tensor {name} must be {list(shape)}, is {list(tensor.shape)}")
            self._weights[name] = tensor.detach().to(device, torch.float32).contiguous()

    def __call__(self, x: Tensor, columns: tuple[int, ...] | None = None) -> Tensor:
        """The layers of x [N, in] float32 -> [N, out] float32.

        Args:
            x: Vectors.
            columns: Columns of the output to compute, in this order; None for all.
        """
        if columns is not None and not (self.spec.steps and isinstance(self.spec.steps[-1], DenseSpec)):
            return self(x)[:, list(columns)]
        for number, step in enumerate(self.spec.steps, 1):
            if isinstance(step, DenseSpec):
                x = self._dense(step, x, columns if number == len(self.spec.steps) else None)
            elif isinstance(step, LayerNormSpec):
                x = self._layer_norm(x, self._weights[step.weight], self._optional(step.bias), step.eps)
            elif isinstance(step, NormalizeSpec):
                x = normalize(x)
            else:
                x = self._activate(x, step.activation)
        return x

    def _dense(self, step: DenseSpec, x: Tensor, columns: tuple[int, ...] | None) -> Tensor:
        weight, bias, residual = self._weights[step.weight], self._optional(step.bias), self._optional(step.residual)
        if columns is not None:
            chosen = list(columns)
            weight, bias = weight[chosen], None if bias is None else bias[chosen]
            residual = None if residual is None else residual[chosen]
        out = self._activate(self._linear(x.contiguous(), weight, bias), step.activation)
        if not step.use_residual:
            return out
        if residual is not None:
            return out + self._linear(x.contiguous(), residual, None)
        return out + (x if columns is None else x[:, list(columns)])

    def _optional(self, name: str | None) -> Tensor | None:
        return None if name is None else self._weights[name]
