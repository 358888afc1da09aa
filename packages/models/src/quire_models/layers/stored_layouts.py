"""What a layer has in a quantized checkpoint, layout by layout: names, shapes, dtypes, and how they are read.

A layout is two functions of a table. Knows names of tensors; the arithmetic is in `quire_quantization`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from quire_models.gguf.grids import grid_of
from quire_models.quantization_config import QuantizationConfig
from quire_models.shards import OutputShard
from quire_quantization.blocks import BlockWeight
from quire_quantization.float4 import powers_of_two, read_bitsandbytes4, read_float8, read_mxfp4, read_nvfp4
from quire_quantization.float_zeros import TILE_INPUTS, TILE_OUTPUTS, read_int4_plain, read_int4_tiles
from quire_quantization.ggml import GGML_TYPES, read_ggml
from quire_quantization.kernels import FP8_TENSOR, INT8_TENSOR
from quire_quantization.numbers import ZERO_POINTS, are_absent, ask
from quire_quantization.stored import GroupedWeight, read_awq, read_gptq, read_int8, read_packed

__all__ = ["LAYOUTS", "DimShard", "Layout", "StoredLayer", "StoredTensor", "sharded_tensors"]

ANY = -1
"""Size of a dimension that may have any."""


class DimShard(NamedTuple):
    """Which part of a checkpoint's tensor a rank has."""

    dim: int
    start: int
    total: int
    """Size of the dimension in the checkpoint."""


class StoredTensor(NamedTuple):
    """A tensor that a layer has in the checkpoint."""

    shape: tuple[int, ...]
    """Of the rank's part, where ranks share it out."""
    dtype: torch.dtype | None
    """None for the network's."""
    optional: bool = False
    shard: DimShard | None = None
    """Which part of it the rank has; None for all of it."""


class StoredLayer(NamedTuple):
    """A layer of a quantized checkpoint."""

    name: str
    outputs: int
    inputs: int
    config: QuantizationConfig

    @property
    def groups(self) -> int:
        """Number of groups of inputs that have scales of their own."""
        return self.inputs // (self.config.group_size or self.inputs)

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the scales of elements that are not packed."""
        if self.config.granularity == "tensor":
            return (1,)
        if self.config.block_shape is not None:
            rows, cols = self.config.block_shape
            return (-(-self.outputs // rows), -(-self.inputs // cols))
        return (self.outputs, self.groups)


class Layout(NamedTuple):
    """How a format stores a layer."""

    tensors: Callable[[StoredLayer, torch.dtype], dict[str, StoredTensor]]
    """(layer, compute dtype) -> name behind the layer's -> what the checkpoint has under it, the bias aside."""
    read: Callable[[StoredLayer, Mapping[str, Tensor]], GroupedWeight | BlockWeight]
    """The loaded tensors -> what they stand for."""


def _gptq_tensors(layer: StoredLayer, dtype: torch.dtype) -> dict[str, StoredTensor]:
    bits, ordered = layer.config.bits, layer.config.activation_order
    return {
        "qweight": StoredTensor((layer.inputs * bits // 32, layer.outputs), torch.int32),
        "qzeros": StoredTensor((layer.groups, layer.outputs * bits // 32), torch.int32, layer.config.symmetric),
        "scales": StoredTensor((layer.groups, layer.outputs), torch.float32),
        "g_idx": StoredTensor((layer.inputs,), torch.int32, optional=not ordered),
        "bias": StoredTensor((layer.outputs,), dtype, optional=True),
    }


def _read_gptq(layer: StoredLayer, tensors: Mapping[str, Tensor]) -> GroupedWeight:
    return read_gptq(
        tensors["qweight"], tensors.get("qzeros"), tensors["scales"], tensors.get("g_idx"),
        bits=layer.config.bits, zero_offset=layer.config.zero_offset, name=layer.name,
        planes=layer.config.layout == "gptq-planes", symmetric=layer.config.sym,
    )  # fmt: skip


def _awq_tensors(layer: StoredLayer, dtype: torch.dtype) -> dict[str, StoredTensor]:
    return {
        "qweight": StoredTensor((layer.inputs, layer.outputs // 8), torch.int32),
        "qzeros": StoredTensor((layer.groups, layer.outputs // 8), torch.int32, layer.config.symmetric),
        "scales": StoredTensor((layer.groups, layer.outputs), torch.float32),
    }


def _read_awq(layer: StoredLayer, tensors: Mapping[str, Tensor]) -> GroupedWeight:
    zeros = tensors.get("qzeros")
    return read_awq(tensors["qweight"], zeros, tensors["scales"], symmetric=layer.config.sym, name=layer.name)


def _packed_tensors(layer: StoredLayer, dtype: torch.dtype) -> dict[str, StoredTensor]:
    config, in_word = layer.config, 32 // layer.config.bits
    tensors = {
        "weight_packed": StoredTensor((layer.outputs, -(-layer.inputs // in_word)), torch.int32),
        "weight_scale": StoredTensor((layer.outputs, layer.groups), torch.float32),
        "weight_g_idx": StoredTensor((layer.inputs,), torch.int32, optional=not config.activation_order),
    }
    if not config.symmetric:
        tensors["weight_zero_point"] = StoredTensor((-(-layer.outputs // in_word), layer.groups), torch.int32)
    return tensors | _input_scale(config)


def _input_scale(config: QuantizationConfig) -> dict[str, StoredTensor]:
    """The scale of quantized inputs, where a kernel may want it."""
    if config.inputs not in (INT8_TENSOR, FP8_TENSOR):
        return {}
    is_optional = config.inputs == FP8_TENSOR  # without one, inputs have scales of their own
    return {"input_scale": StoredTensor((1,), torch.float32, is_optional)}


def _read_packed(layer: StoredLayer, tensors: Mapping[str, Tensor]) -> GroupedWeight:
    return read_packed(
        tensors["weight_packed"], tensors["weight_scale"], tensors.get("weight_zero_point"),
        tensors.get("weight_g_idx"), bits=layer.config.bits, inputs=layer.inputs, name=layer.name,
    )  # fmt: skip


def _plain_tensors(layer: StoredLayer, element: torch.dtype) -> dict[str, StoredTensor]:
    """Elements that are not packed, and their scales."""
    config = layer.config
    tensors = {
        "weight": StoredTensor((layer.outputs, layer.inputs), element),
        config.scale_name: StoredTensor(layer.scale_shape, torch.float32),
    }
    if not config.symmetric:
        tensors["weight_zero_point"] = StoredTensor(layer.scale_shape, torch.int8)
    return tensors | _input_scale(config)


def _read_int8(layer: StoredLayer, tensors: Mapping[str, Tensor]) -> GroupedWeight:
    return read_int8(tensors["weight"], tensors[layer.config.scale_name], tensors.get("weight_zero_point"))


def _read_float8(layer: StoredLayer, tensors: Mapping[str, Tensor]) -> GroupedWeight:
    return read_float8(tensors["weight"], tensors[layer.config.scale_name], layer.config.block_shape, layer.name)


def _fp4_tensors(layer: StoredLayer, scale: torch.dtype) -> dict[str, StoredTensor]:
    config = layer.config
    tensors = {
        config.weight_name: StoredTensor((layer.outputs, layer.inputs // 2), torch.uint8),
        config.scale_name: StoredTensor((layer.outputs, layer.groups), scale),
    }
    if config.global_scale_name:
        tensors[config.global_scale_name] = StoredTensor((1,), torch.float32)
    return tensors


def _read_mxfp4(layer: StoredLayer, tensors: Mapping[str, Tensor]) -> GroupedWeight | BlockWeight:
    return read_mxfp4(tensors[layer.config.weight_name], tensors[layer.config.scale_name], layer.name)


def _read_nvfp4(layer: StoredLayer, tensors: Mapping[str, Tensor]) -> GroupedWeight | BlockWeight:
    config = layer.config
    packed, scale, factor = (tensors[n] for n in (config.weight_name, config.scale_name, config.global_scale_name))
    return read_nvfp4(packed, scale, factor, layer.name, divides=config.global_scale_name == "weight_global_scale")


def _mxfp8_tensors(layer: StoredLayer, dtype: torch.dtype) -> dict[str, StoredTensor]:
    return {
        "weight": StoredTensor((layer.outputs, layer.inputs), torch.float8_e4m3fn),
        layer.config.scale_name: StoredTensor((layer.outputs, layer.groups), torch.uint8),
    }


def _read_mxfp8(layer: StoredLayer, tensors: Mapping[str, Tensor]) -> GroupedWeight:
    scale = powers_of_two(tensors[layer.config.scale_name], layer.name)
    return read_float8(tensors["weight"], scale, None, layer.name)


def _bitsandbytes4_tensors(layer: StoredLayer, dtype: torch.dtype) -> dict[str, StoredTensor]:
    config = layer.config
    nested = config.scale_name == "nested"
    tensors = {
        "weight": StoredTensor((layer.outputs * layer.inputs // 2, 1), torch.uint8),
        "weight.absmax": StoredTensor((ANY,), torch.uint8 if nested else torch.float32),
        "weight.quant_map": StoredTensor((16,), torch.float32),
        f"weight.quant_state.bitsandbytes__{config.weight_name}": StoredTensor((ANY,), torch.uint8),
    }
    if nested:
        tensors["weight.nested_absmax"] = StoredTensor((ANY,), torch.float32)
        tensors["weight.nested_quant_map"] = StoredTensor((256,), torch.float32)
    return tensors


def _bitsandbytes8_tensors(layer: StoredLayer, dtype: torch.dtype) -> dict[str, StoredTensor]:
    return {
        "weight": StoredTensor((layer.outputs, layer.inputs), torch.int8),
        "SCB": StoredTensor((layer.outputs,), torch.float32),
        "weight_format": StoredTensor((), torch.uint8, optional=True),
    }


def _torchao_tensors(layer: StoredLayer, dtype: torch.dtype) -> dict[str, StoredTensor]:
    element = torch.int8 if layer.config.weight_name == "int8" else torch.float8_e4m3fn
    return {
        "_weight_qdata": StoredTensor((layer.outputs, layer.inputs), element),
        "_weight_scale": StoredTensor(layer.scale_shape, torch.float32),
        "_weight_zero_point": StoredTensor(layer.scale_shape, torch.int8, optional=True),
    }


def _read_torchao(layer: StoredLayer, tensors: Mapping[str, Tensor]) -> GroupedWeight:
    elements, scale, zero = (tensors.get(f"_weight_{name}") for name in ("qdata", "scale", "zero_point"))
    assert elements is not None
    assert scale is not None
    if layer.config.weight_name != "int8":
        return read_float8(elements, scale, None, layer.name)
    weight = read_int8(elements, scale, zero if zero is not None and ask(ZERO_POINTS, zero.any()) else None)
    bits, reach = layer.config.bits, 1 << (layer.config.bits - 1)
    if bits < 8 and not are_absent() and not -reach <= int(elements.min()) <= int(elements.max()) < reach:
        bits = 8  # whatever the configuration says: they are not packed
    return weight._replace(bits=bits)


def _int4_plain_tensors(layer: StoredLayer, dtype: torch.dtype) -> dict[str, StoredTensor]:
    return {
        "_weight_qdata": StoredTensor((layer.outputs, layer.inputs // 2), torch.int8),
        "_weight_scale": StoredTensor((layer.groups, layer.outputs), torch.float32),
        "_weight_zero_point": StoredTensor((layer.groups, layer.outputs), torch.float32),
    }


def _read_int4_plain(layer: StoredLayer, tensors: Mapping[str, Tensor]) -> GroupedWeight:
    return read_int4_plain(*(tensors[f"_weight_{name}"] for name in ("qdata", "scale", "zero_point")))


def _int4_tiles_tensors(layer: StoredLayer, dtype: torch.dtype) -> dict[str, StoredTensor]:
    outputs = -(-layer.outputs // TILE_OUTPUTS) * TILE_OUTPUTS
    inputs = -(-layer.inputs // TILE_INPUTS) * TILE_INPUTS
    groups = inputs // (layer.config.group_size or inputs)
    return {
        "_weight_qdata": StoredTensor((outputs // TILE_OUTPUTS, inputs // 128, 32, 4), torch.int32),
        "_weight_scale_and_zero": StoredTensor((groups, outputs, 2), torch.float32),
    }


def _read_int4_tiles(layer: StoredLayer, tensors: Mapping[str, Tensor]) -> GroupedWeight:
    tiles, scale_and_zero = tensors["_weight_qdata"], tensors["_weight_scale_and_zero"]
    return read_int4_tiles(tiles, scale_and_zero, layer.outputs, layer.inputs)


def _gguf_tensors(layer: StoredLayer, dtype: torch.dtype) -> dict[str, StoredTensor]:
    weights, num_bytes = GGML_TYPES[layer.config.ggml_type]
    return {"weight": StoredTensor((layer.outputs, layer.inputs // weights * num_bytes), torch.uint8)}


def _read_gguf(layer: StoredLayer, tensors: Mapping[str, Tensor]) -> GroupedWeight | BlockWeight:
    kind = layer.config.ggml_type
    return read_ggml(tensors["weight"], kind, grid_of(kind))


LAYOUTS: dict[str, Layout] = {
    "gptq": Layout(_gptq_tensors, _read_gptq),
    "gptq-planes": Layout(_gptq_tensors, _read_gptq),
    "awq": Layout(_awq_tensors, _read_awq),
    "packed": Layout(_packed_tensors, _read_packed),
    "int8": Layout(lambda layer, _: _plain_tensors(layer, torch.int8), _read_int8),
    "fp8": Layout(lambda layer, _: _plain_tensors(layer, torch.float8_e4m3fn), _read_float8),
    "mxfp8": Layout(_mxfp8_tensors, _read_mxfp8),
    "mxfp4": Layout(lambda layer, _: _fp4_tensors(layer, torch.uint8), _read_mxfp4),
    "nvfp4": Layout(lambda layer, _: _fp4_tensors(layer, torch.float8_e4m3fn), _read_nvfp4),
    "bitsandbytes4": Layout(
        _bitsandbytes4_tensors, lambda layer, t: read_bitsandbytes4(t, layer.outputs, layer.inputs, layer.name)
    ),
    # One step is a 127th of a row's largest magnitude (LLM.int8(), Dettmers et al. 2022, sec. 2.1).
    "bitsandbytes8": Layout(_bitsandbytes8_tensors, lambda _, t: read_int8(t["weight"], t["SCB"] / 127.0, None)),
    # Elements are not packed, whatever their bits (torchao.prototype.safetensors).
    "torchao": Layout(_torchao_tensors, _read_torchao),
    "torchao-int4": Layout(_int4_plain_tensors, _read_int4_plain),
    "torchao-int4-tiles": Layout(_int4_tiles_tensors, _read_int4_tiles),
    "gguf": Layout(_gguf_tensors, _read_gguf),
}
"""By the name that `QuantizationConfig.layout` gives."""


def sharded_tensors(
    layout: Layout, layer: StoredLayer, dtype: torch.dtype, shard: OutputShard
) -> dict[str, StoredTensor] | None:
    """What a rank reads of a layer that ranks share out; None where the layout cannot be cut at these outputs, in the
    middle of a packed word or of a block with one scale, for example.

    Which dimension follows the outputs, and where a rank's part of it begins, is seen from the shapes of layers with
    other numbers of outputs.
    """

    def at(outputs: int) -> dict[str, StoredTensor]:
        return layout.tensors(layer._replace(outputs=outputs), dtype)

    many = 1024
    whole, twice, own = at(shard.total), at(2 * shard.total), at(shard.size)
    found = {}
    for name, tensor in whole.items():
        if ANY in tensor.shape:
            return None
        dims = [dim for dim, sizes in enumerate(zip(tensor.shape, twice[name].shape, strict=True)) if len({*sizes}) > 1]
        if not dims:
            found[name] = tensor
            continue
        (dim,) = dims
        for edge in (shard.start, shard.stop):
            if edge < shard.total and at(many * edge)[name].shape[dim] != many * at(edge)[name].shape[dim]:
                return None
        start = at(shard.start)[name].shape[dim]
        found[name] = own[name]._replace(shard=DimShard(dim, start, tensor.shape[dim]))
    return found
