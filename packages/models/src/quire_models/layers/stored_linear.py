"""The linear method of a quantized checkpoint: which tensors a layer has there, and what ops make of them.

Knows layouts by `QuantizationConfig`; the arithmetic of reading them is in `quire_quantization.stored`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire_interfaces import CheckpointError, ConfigError
from quire_models.quantization_config import QuantizationConfig
from quire_ops import OpRequest, bind
from quire_ops.grouped import block_groups
from quire_quantization.ggml import GGML_TYPES, read_ggml
from quire_quantization.stored import (
    GroupedIntegers,
    exact_scale,
    grouped_weights,
    read_awq,
    read_gptq,
    read_packed,
)

__all__ = ["StoredLinear", "StoredTensor"]


class StoredTensor(NamedTuple):
    """A tensor that a layer has in the checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None for the network's."""
    optional: bool = False


class StoredLinear:
    """One layer's method: `read` makes its weights, `apply` multiplies with them."""

    logits_op = "grouped_linear"

    def __init__(self, config: QuantizationConfig, request: OpRequest, name: str, outputs: int, inputs: int) -> None:
        """Args:
        name: Of the layer, for messages.

        Raises:
            CheckpointError: The layer's size does not fit the layout.
        """
        if request.device != "cpu":
            raise ConfigError(f"quantized checkpoints run on the cpu for now, not on {request.device}", field="device")
        self.config, self.name = config, config.name
        self._layer, self._outputs, self._inputs, self._dtype = name, outputs, inputs, request.dtype
        self._grouped_linear, self._int8_linear = bind("grouped_linear", request), bind("int8_linear", request)
        self._w8a8_linear = bind("w8a8_linear", request)
        packed = 32 // config.bits
        awkward = {"gptq": inputs % packed or outputs % packed, "awq": outputs % packed}.get(config.layout, 0)
        if awkward or inputs % (config.group_size or 1):
            raise CheckpointError(f"{name}: {outputs} x {inputs} does not fit {config.name}; config.json is of another")

    def tensors(self) -> dict[str, StoredTensor]:
        """Name behind the layer's -> what the checkpoint has under it, the bias aside."""
        config, outputs, inputs = self.config, self._outputs, self._inputs
        groups, packed = inputs // (config.group_size or inputs), 32 // config.bits
        if config.layout == "gptq":
            return {
                "qweight": StoredTensor((inputs // packed, outputs), torch.int32),
                "qzeros": StoredTensor((groups, outputs // packed), torch.int32),
                "scales": StoredTensor((groups, outputs), torch.float32),
                "g_idx": StoredTensor((inputs,), torch.int32, optional=not config.activation_order),
                "bias": StoredTensor((outputs,), self._dtype, optional=True),
            }
        if config.layout == "awq":
            return {
                "qweight": StoredTensor((inputs, outputs // packed), torch.int32),
                "qzeros": StoredTensor((groups, outputs // packed), torch.int32),
                "scales": StoredTensor((groups, outputs), torch.float32),
            }
        if config.layout == "packed":
            tensors = {
                "weight_packed": StoredTensor((outputs, -(-inputs // packed)), torch.int32),
                "weight_scale": StoredTensor((outputs, groups), torch.float32),
                "weight_g_idx": StoredTensor((inputs,), torch.int32, optional=not config.activation_order),
            }
            if not config.symmetric:
                tensors["weight_zero_point"] = StoredTensor((-(-outputs // packed), groups), torch.int32)
            return tensors
        if config.layout == "gguf":
            weights, num_bytes, _ = GGML_TYPES[config.ggml_type]
            return {"weight": StoredTensor((outputs, inputs // weights * num_bytes), torch.uint8)}
        dtype = torch.int8 if config.layout == "int8" else torch.float8_e4m3fn
        tensors = {
            "weight": StoredTensor((outputs, inputs), dtype),
            config.scale_name: StoredTensor(self._scale_shape(groups), torch.float32),
        }
        if not config.symmetric:
            tensors["weight_zero_point"] = StoredTensor(self._scale_shape(groups), torch.int8)
        if config.activations == "static":
            tensors["input_scale"] = StoredTensor((1,), torch.float32)
        return tensors

    def _scale_shape(self, groups: int) -> tuple[int, ...]:
        if self.config.granularity == "tensor":
            return (1,)
        if self.config.block_shape is not None:
            rows, cols = self.config.block_shape
            return (-(-self._outputs // rows), -(-self._inputs // cols))
        return (self._outputs, groups)

    def read(self, tensors: dict[str, Tensor], bias: Tensor | None) -> dict[str, Tensor]:
        """The tensors of the checkpoint -> what `apply` needs."""
        weights = self._read(tensors)
        bias = tensors.get("bias", bias)
        return weights if bias is None else {**weights, "bias": bias}

    def _read(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        config = self.config
        if config.layout == "fp8":
            return self._read_float8(tensors["weight"], tensors[config.scale_name])
        if config.layout == "int8":
            weights = self._read_int8(tensors["weight"], tensors[config.scale_name], tensors.get("weight_zero_point"))
            if config.activations is None or weights["scale"].ndim > 1:
                return weights
            return {**weights, "input_scale": self._input_scale(tensors.get("input_scale"))}
        return grouped_weights(self.integers(tensors), config.bits, self._dtype, self._layer)

    def integers(self, tensors: dict[str, Tensor]) -> GroupedIntegers:
        """What packed integers stand for."""
        config = self.config
        if config.layout == "gptq":
            return read_gptq(
                tensors["qweight"], tensors["qzeros"], tensors["scales"], tensors.get("g_idx"),
                bits=config.bits, zero_offset=config.zero_offset, name=self._layer,
            )  # fmt: skip
        if config.layout == "gguf":
            return read_ggml(tensors["weight"], config.ggml_type)
        if config.layout == "awq":
            return read_awq(tensors["qweight"], tensors["qzeros"], tensors["scales"])
        return read_packed(
            tensors["weight_packed"], tensors["weight_scale"], tensors.get("weight_zero_point"),
            tensors.get("weight_g_idx"), bits=config.bits, inputs=self._inputs, name=self._layer,
        )  # fmt: skip

    def _read_int8(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> dict[str, Tensor]:
        scale = scale.expand(self._outputs, -1) if scale.ndim == 2 else scale.expand(self._outputs)[:, None]
        if scale.shape[1] == 1 and zero is None and exact_scale(scale, self._dtype).dtype == self._dtype:
            return {"weight": weight, "scale": scale[:, 0].to(self._dtype).contiguous()}
        if zero is not None:
            zero = (zero if zero.ndim == 2 else zero[:, None]).expand(scale.shape).to(torch.int16)
        return grouped_weights(GroupedIntegers(weight, scale, zero), 8, self._dtype, self._layer)

    def _input_scale(self, scale: Tensor | None) -> Tensor:
        if scale is None:
            return torch.zeros(1)
        if not 0.0 < float(scale) < torch.inf:
            raise CheckpointError(f"{self._layer}.input_scale is {float(scale)}, should be above 0; get the file again")
        return scale.float()

    def _read_float8(self, weight: Tensor, scale: Tensor) -> dict[str, Tensor]:
        if (weight.view(torch.uint8) & 0x7F == 0x7F).any():
            raise CheckpointError(f"{self._layer}: its fp8 weight has elements that are no numbers; get the file again")
        if self.config.block_shape is not None:
            rows, cols = self.config.block_shape
            scale = scale.repeat_interleave(rows, dim=0)[: self._outputs]
            scale = scale.repeat_interleave(cols // 128, dim=1)[:, : -(-self._inputs // 128)]
            return {"weight": weight, "scale": _blocked(scale, self._dtype)}
        scale = scale if scale.ndim == 2 else scale.expand(self._outputs)[:, None]
        if scale.shape[1] == 1:
            scale = scale.expand(self._outputs, -(-self._inputs // 128))
        return {"weight": weight, "scale": _blocked(scale, self._dtype)}

    def apply(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        """x [N, in_features] -> [N, out_features]."""
        return self._multiply(weights, x, weights.get("bias"), wide=False)

    def logits(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        """x [N, in_features] -> [N, out_features] float32, without a bias."""
        return self._multiply(weights, x, None, wide=True)

    def _multiply(self, weights: dict[str, Tensor], x: Tensor, bias: Tensor | None, *, wide: bool) -> Tensor:
        if "order" in weights:
            x = x.index_select(1, weights["order"])
        if "input_scale" in weights:
            scales = weights["scale"], weights["input_scale"]
            out: Tensor = self._w8a8_linear(x, weights["weight"], *scales, bias, wide=wide)
        elif weights["scale"].ndim == 1:
            out = self._int8_linear(x, weights["weight"], weights["scale"], bias, wide=wide)
        else:
            out = self._grouped_linear(x, weights["weight"], weights["scale"], weights.get("zero"), bias, wide=wide)
        return out


def _blocked(scale: Tensor, dtype: torch.dtype) -> Tensor:
    return block_groups(exact_scale(scale, dtype))
