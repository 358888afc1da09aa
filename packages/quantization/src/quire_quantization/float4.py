"""Weights of checkpoints in floating point of 4 or 8 bits, and in codes -> as ops take them.

Layouts:
- fp8: weight [O, I] float8 e4m3, scales for a tensor, an output, groups or blocks.
- mxfp4: two elements e2m1 in a byte [O, I / 2], the first lower; a power of two for each 32 inputs [O, I / 32]
  (OCP Microscaling Formats 1.0, sec. 5.3 and 5.4).
- nvfp4: the same elements; for each 16 inputs a scale in fp8 e4m3 [O, I / 16], and one more for the tensor.
- bitsandbytes: two places in a table of 16 in a byte, the first upper, row after row; a scale for each 64 or more of
  them (QLoRA, Dettmers et al. 2023, sec. 3), which may be places in a table of 256 with scales of their own.
Knows tensors; does not know files or names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quire_interfaces import CheckpointError
from quire_ops.block_formats import BLOCK_FORMATS
from quire_quantization.blocks import BlockWeight, blocks_of
from quire_quantization.numbers import are_absent
from quire_quantization.stored import GroupedWeight

__all__ = ["FP4_DOUBLED", "powers_of_two", "read_bitsandbytes4", "read_float8", "read_mxfp4", "read_nvfp4"]

FP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of e2m1, by their bits."""
_E8M0_NAN = 255


def read_float8(weight: Tensor, scale: Tensor, block: tuple[int, int] | None, name: str) -> GroupedWeight:
    """scale: [1], [O], [O, 1], [O, G], or one for each block of (outputs, a multiple of 128 inputs)."""
    if not are_absent() and (weight.view(torch.uint8) & 0x7F == 0x7F).any():
        raise CheckpointError(f"{name}: its fp8 weight has elements that are no numbers; get the file again")
    outputs, inputs = weight.shape
    if block is not None:
        scale = scale.repeat_interleave(block[0], dim=0)[:outputs]
        scale = scale.repeat_interleave(block[1] // 128, dim=1)[:, : -(-inputs // 128)]
        return GroupedWeight(weight, scale, None, group_size=128)
    scale = scale if scale.ndim == 2 else scale.expand(outputs)[:, None]
    return GroupedWeight(weight, scale, None)


def powers_of_two(exponents: Tensor, name: str) -> Tensor:
    """uint8 exponents with 127 added (e8m0) -> float32."""
    if not are_absent() and (exponents == _E8M0_NAN).any():
        raise CheckpointError(f"{name}: it has scales that are no numbers (255); get the file again")
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)


def _elements(packed: Tensor) -> Tensor:
    """[O, I / 2] uint8 -> [O, I] int8: twice the values of e2m1."""
    bits = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)
    return torch.tensor(FP4_DOUBLED, dtype=torch.int8)[bits.int()]


def _numbers(packed: Tensor) -> Tensor:
    """[O, I / 2] uint8 -> [O, I] uint8 from 0 to 15."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)


def read_mxfp4(packed: Tensor, exponents: Tensor, name: str) -> GroupedWeight | BlockWeight:
    """In blocks; else as whole numbers: twice the elements, half the scales."""

    def whole_numbers(_: Tensor) -> GroupedWeight:
        return GroupedWeight(_elements(packed), powers_of_two(exponents, name) * 0.5, None)

    powers_of_two(exponents[:, :0] if are_absent() else exponents, name)  # whether they are numbers
    blocks = blocks_of(exponents[:, :, None], _numbers(packed), "MXFP4")
    return BlockWeight(blocks, "MXFP4", whole_numbers=whole_numbers)


def read_nvfp4(
    packed: Tensor, scale: Tensor, factor: Tensor, name: str, *, divides: bool
) -> GroupedWeight | BlockWeight:
    """factor [1]: of all scales; `divides`: they are divided by it. In blocks, of whole 32 inputs."""
    if not are_absent() and not 0.0 < float(factor) < torch.inf:
        raise CheckpointError(f"{name}: its global scale is {float(factor)}, should be above 0; get the file again")
    if packed.shape[1] % 16 == 0:
        blocks = blocks_of(scale.view(torch.uint8).unflatten(1, (-1, 2)), _numbers(packed), "NVFP4")
        return BlockWeight(blocks, "NVFP4", torch.tensor([1.0 if are_absent() else float(factor), float(divides)]))
    wide = scale.float() / factor.float() if divides else scale.float() * factor.float()
    return GroupedWeight(_elements(packed).float() * 0.5, wide, None)


def read_bitsandbytes4(
    tensors: Mapping[str, Tensor], outputs: int, inputs: int, name: str
) -> GroupedWeight | BlockWeight:
    """tensors: "weight" and what is behind "weight." in the file; see bitsandbytes' `QuantState`."""
    if are_absent():  # so is the state, which is text in numbers
        if inputs % 64 == 0:
            blocks = torch.empty(outputs, BLOCK_FORMATS["TABLE4"].row_bytes(inputs), dtype=torch.uint8)
            return BlockWeight(blocks, "TABLE4", torch.empty(16))
        return GroupedWeight(torch.empty(outputs, inputs), torch.ones(outputs, 1), None)
    state = _state(next(tensor for key, tensor in tensors.items() if ".bitsandbytes__" in key), name)
    size, count = state["blocksize"], outputs * inputs
    if tuple(state["shape"]) != (outputs, inputs) or tensors["weight"].numel() * 2 != count:
        raise CheckpointError(
            f"{name}: it is {outputs} x {inputs}, but its quant_state is of {state['shape']} and it has "
            f"{tensors['weight'].numel() * 2} elements; get the files again"
        )
    absmax = tensors["weight.absmax"]
    if "weight.nested_absmax" in tensors:
        codes, nested = tensors["weight.nested_quant_map"].float(), tensors["weight.nested_absmax"].float()
        per_block = nested.repeat_interleave(state["nested_blocksize"])
        if len(per_block) < len(absmax):
            raise CheckpointError(f"{name}: it has {len(nested)} scales for {len(absmax)} scales; get the files again")
        absmax = codes[absmax.int()] * per_block[: len(absmax)] + state["nested_offset"]
    if len(absmax) != -(-count // size):
        raise CheckpointError(
            f"{name}: it has {len(absmax)} scales, {count} elements in blocks of {size} need {-(-count // size)}; get "
            "the files again"
        )
    packed = tensors["weight"].view(torch.uint8).flatten()
    places = torch.stack((packed >> 4, packed & 0xF), dim=-1).flatten()
    if inputs % 64 == 0 and size % 64 == 0 and count % size == 0:
        scales = absmax.float().repeat_interleave(size // 64).view(outputs, -1, 1).view(torch.uint8)
        blocks = blocks_of(scales, places.view(outputs, inputs), "TABLE4")
        return BlockWeight(blocks, "TABLE4", tensors["weight.quant_map"].float())
    values = tensors["weight.quant_map"].float()[places.int()].view(outputs, inputs)
    if inputs % size:  # blocks go over the ends of rows
        wide = absmax.float().repeat_interleave(size)[:count].view(outputs, inputs)
        return GroupedWeight(values * wide, torch.ones(outputs, 1), None)
    return GroupedWeight(values, absmax.float().view(outputs, -1), None)


def _state(raw: Tensor, name: str) -> dict[str, Any]:
    try:
        state = json.loads(bytes(raw.tolist()))
        return {"blocksize": 64, **state} if {"shape", "blocksize"} <= state.keys() else _broken(name, "incomplete")
    except (ValueError, AttributeError) as error:
        return _broken(name, str(error))


def _broken(name: str, why: str) -> dict[str, Any]:
    raise CheckpointError(f"{name}: its quant_state cannot be read ({why}); get the files again")
