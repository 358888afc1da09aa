"""The linear method of a layer of a quantized checkpoint: its tensors there, and the kernel that multiplies with them.

Layouts are in `stored_layouts.py`, kernels in `quire_quantization.kernels`; which one serves is decided once, when the
weight is there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from quire_interfaces import CheckpointError
from quire_models.layers.stored_layouts import LAYOUTS, StoredLayer, StoredTensor, sharded_tensors
from quire_models.quantization_config import OnlineTransform, QuantizationConfig
from quire_models.shards import OutputShard
from quire_ops import OpRequest, QuantizedTokens, bind
from quire_quantization.joined import ROTATED
from quire_quantization.kernels import BoundOps, KernelChoice, choose_kernel, form_on_device
from quire_quantization.numbers import are_absent, once
from quire_quantization.rotation import hadamard_matrix, hadamard_rotated

__all__ = ["StoredLinear", "StoredTensor"]


class StoredLinear:
    """One layer's method: `read` makes its weights, `apply` multiplies with them."""

    logits_op = "grouped_linear"

    def __init__(
        self,
        config: QuantizationConfig,
        request: OpRequest,
        name: str,
        outputs: int,
        inputs: int,
        disabled: Collection[str] = (),
        device: torch.device | str = "cpu",
        *,
        shard: OutputShard | None = None,
    ) -> None:
        """Args:
        name: Full name of the layer, for messages.
        disabled: Ops that may not serve.
        device: Where weights are put, once they are read on the host.
        shard: The rank's outputs; None for all.

        Raises:
            CheckpointError: The layer's size does not fit the layout.
        """
        self.config, self.name = config, config.name
        self._layer, self._layout = StoredLayer(name, outputs, inputs, config), LAYOUTS[config.layout]
        self._shard = shard
        self._tensors = self._layout.tensors(self._layer, request.dtype)
        sharded = None if shard is None else sharded_tensors(self._layout, self._layer, request.dtype, shard)
        if shard is not None and sharded is not None:  # else all of it is read, and cut afterwards
            self._tensors, self._layer, self._shard = sharded, self._layer._replace(outputs=shard.size), None
        sizes = {"in_features": inputs, "out_features": outputs if shard is None else shard.size}
        self._request, self._disabled = replace(request, sizes=sizes), disabled
        self._device = device
        self._rotations = {each.location: _rotation(each, name, outputs, inputs, shard) for each in config.transforms}
        self._ops: BoundOps = cache(lambda op: bind(op, request))
        self.choice: KernelChoice | None = None
        """Set by `read`."""
        self.has_input_scale = False
        """The checkpoint has a scale for quantizing the inputs. Set by `read`."""
        step = 32 if 32 % config.bits or config.layout == "gptq-planes" else 32 // config.bits
        uneven = inputs % step or outputs % step
        awkward = {"gptq": uneven, "gptq-planes": uneven, "awq": outputs % step}.get(config.layout, 0)
        if awkward or inputs % (config.group_size or 1):
            raise CheckpointError(f"{name}: {outputs} x {inputs} does not fit {config.name}; config.json is of another")

    @property
    def op(self) -> str:
        """The op behind `apply`, once the weight is read."""
        return "" if self.choice is None else self.choice.kernel.op.name

    @property
    def layer(self) -> str:
        """The layer's full name."""
        return self._layer.name

    def tensors(self) -> dict[str, StoredTensor]:
        """Name behind the layer's -> what the checkpoint has under it, the bias aside."""
        matrices = {
            each.tensor: StoredTensor((size, size), torch.float32, optional=True)
            for each, size in zip(self.config.transforms, self._rotations.values(), strict=True)
        }
        return {**self._tensors, **matrices}

    def read(self, tensors: dict[str, Tensor], bias: Tensor | None) -> dict[str, Tensor]:
        """The tensors of the checkpoint, on the host -> what `apply` needs, but for `on_device` still there."""
        for each in self.config.transforms:
            matrix = tensors.pop(each.tensor, None)
            if matrix is not None and not are_absent() and not torch.equal(matrix, hadamard_matrix(len(matrix))):
                raise CheckpointError(
                    f"{self._layer.name}.{each.tensor} is not Sylvester's Hadamard matrix, as transform_config has it"
                )
        alike = (self._layer._replace(name=""), self._shard, self._request.dtype, self._device, *sorted(tensors))
        self.choice, weights = once(alike, partial(self._read_weight, tensors))
        self.has_input_scale = "input_scale" in weights and "input_scale" in tensors
        own = tensors.get("bias")
        if own is not None:
            bias = own if self._shard is None else own[self._shard.start : self._shard.stop]
        if bias is not None and "output" in self._rotations:
            bias = hadamard_rotated(bias, self._rotations["output"])
        weights = weights if bias is None else {**weights, "bias": bias}
        # Whoever sees it multiplies by this method alone.
        return {**weights, ROTATED: torch.zeros(0)} if self._rotations else weights

    def on_device(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights as `read` made them on the host -> the same on the device that multiplies."""
        return {name: tensor.to(self._device) for name, tensor in weights.items()}

    def _read_weight(self, tensors: dict[str, Tensor]) -> tuple[KernelChoice, dict[str, Tensor]]:
        weight = self._layout.read(self._layer, tensors)
        if self._shard is not None:
            weight = weight.outputs(self._shard.start, self._shard.stop)
        weight, key = form_on_device(weight, self._request, self._disabled)
        choice = choose_kernel(key, self.config.inputs, self._request, self._disabled)
        weights = choice.kernel.make(weight, self._request, self._layer.name)
        if choice.kernel.inputs:
            weights["input_scale"] = self._input_scale(tensors.get("input_scale"))
        return choice, weights

    def _input_scale(self, scale: Tensor | None) -> Tensor:
        if scale is None:
            return torch.zeros(1)
        if not are_absent() and not 0.0 < float(scale) < torch.inf:
            raise CheckpointError(
                f"{self._layer.name}.input_scale is {float(scale)}, should be above 0; get the file again"
            )
        return scale.float()

    def apply(self, weights: dict[str, Tensor], x: Tensor | QuantizedTokens) -> Tensor:
        """x [N, in_features], or rounded as the op does it -> [N, out_features]."""
        return self._multiplied(weights, x, logits=False)

    def logits(self, weights: dict[str, Tensor], x: Tensor | QuantizedTokens) -> Tensor:
        """x [N, in_features], or rounded as the op does it -> [N, out_features] float32, without a bias."""
        return self._multiplied(weights, x, logits=True)

    def _multiplied(self, weights: dict[str, Tensor], x: Tensor | QuantizedTokens, *, logits: bool) -> Tensor:
        assert self.choice is not None
        if "input" in self._rotations:
            assert isinstance(x, Tensor)
            x = hadamard_rotated(x, self._rotations["input"])
        if "output" not in self._rotations:
            return self.choice.kernel.multiply(self._ops, weights, x, logits=logits)
        without_bias = {name: tensor for name, tensor in weights.items() if name != "bias"}
        out = self.choice.kernel.multiply(self._ops, without_bias, x, logits=logits)
        out = hadamard_rotated(out, self._rotations["output"])
        return out if logits or "bias" not in weights else out.add_(weights["bias"])


def _rotation(transform: OnlineTransform, name: str, outputs: int, inputs: int, shard: OutputShard | None) -> int:
    """Features that are rotated together."""
    features = inputs if transform.location == "input" else outputs
    size = transform.size or features
    if size & (size - 1) or features % size:
        raise CheckpointError(
            f"{name}: transform {transform.group} at {transform.location} rotates {size} of {features} features, "
            "which are no power of 2 that divides them; use a checkpoint without it"
        )
    if shard is not None and transform.location == "output":
        raise CheckpointError(
            f"{name}: transform {transform.group} rotates outputs, which ranks share; start it with "
            "tensor_parallel_size 1"
        )
    return size
