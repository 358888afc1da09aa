"""Quantized weights as checkpoints store them -> as ops take them; nothing is rounded on the way.

Layouts (packed integers are int32, the first number in the lowest bits):
- gptq: qweight [I * bits / 32, O] packed along inputs, qzeros [G, O * bits / 32], scales [G, O], g_idx [I]
  (AutoGPTQ's `QuantLinear`, whose first version stores zero points one smaller). Symmetric ones have the middle for a
  zero point, whichever way that was stored: tools disagree, and kernels that know of none never noticed.
- gptq planes: the same, of each 32 numbers first their lower bits, then the others: 5 bits are 4 and 1, 6 are 4 and 2,
  7 are 4, 2 and 1, 3 are 2 and 1 (GPTQModel's format gptq_p).
- awq: qweight [I, O / 8] and qzeros [G, O / 8], of each 8 outputs in the order 0 2 4 6 1 3 5 7, scales [G, O]
  (AutoAWQ's `WQLinear_GEMM`).
- packed: compressed-tensors' weight_packed [O, I * bits / 32] of numbers with 2^(bits - 1) added, weight_scale [O, G],
  weight_zero_point [O * bits / 32, G], weight_g_idx [I].
Knows tensors; does not know files, names or configurations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire_interfaces import CheckpointError
from quire_ops.grouped import block_groups, pack_int4
from quire_quantization.numbers import EXACT_SCALES, ZERO_POINTS, are_absent, ask

__all__ = [
    "GroupedWeight",
    "exact_scale",
    "grouped_weights",
    "pack_int32",
    "read_awq",
    "read_gptq",
    "read_int8",
    "read_packed",
    "unpack_int32",
    "unpack_planes",
]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class GroupedWeight(NamedTuple):
    """value[o, i] = scale[o, group of i] * (element[o, i] - zero[o, group of i])."""

    elements: Tensor
    """[O, I] int8, from -2^(bits - 1); or fp8 e4m3, or float32 values of a code."""
    scale: Tensor
    """[O, G] float."""
    zero: Tensor | None
    """[O, G] int16."""
    order: Tensor | None = None
    """[I] int64: which of the network's inputs column i belongs to; None as they come."""
    group_size: int | None = None
    """Inputs of a group where the last group may be shorter; None divides."""
    bits: int = 8
    """Of whole numbers: at most 4 when they are from -8 to 7."""

    def outputs(self, start: int, stop: int) -> GroupedWeight:
        """The weight of some of its outputs."""
        zero = None if self.zero is None else self.zero[start:stop]
        return self._replace(elements=self.elements[start:stop], scale=self.scale[start:stop], zero=zero)

    def dequantized(self) -> Tensor:
        """[O, I] float32, inputs as the network has them."""
        inputs = self.elements.shape[1]
        size = self.group_size or inputs // self.scale.shape[1]
        wide = self.elements.to(torch.float32, copy=True)
        if self.zero is not None:
            wide -= self.zero.float().repeat_interleave(size, dim=1)[:, :inputs]
        wide *= self.scale.float().repeat_interleave(size, dim=1)[:, :inputs]
        return wide if self.order is None else torch.empty_like(wide).index_copy_(1, self.order, wide)


def unpack_int32(packed: Tensor, bits: int, dim: int) -> Tensor:
    """packed int32 -> int32 numbers from 0, `32 / bits` times as many along `dim`; of 3 bits, 32 in 3 words."""
    words = packed.movedim(dim, -1)
    if 32 % bits:  # 32 numbers side by side in as many words as a number has bits
        pairs = torch.nn.functional.pad(words.unflatten(-1, (-1, bits)).long() & 0xFFFFFFFF, (0, 1))
        first = torch.arange(0, 32 * bits, bits)
        both = pairs[..., first // 32] | pairs[..., first // 32 + 1] << 32
        numbers = ((both >> first % 32) & ((1 << bits) - 1)).int()
    else:
        numbers = (words[..., None] >> torch.arange(0, 32, bits, dtype=torch.int32)) & ((1 << bits) - 1)
    return numbers.flatten(-2).movedim(-1, dim)


_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
"""Bits of a number -> bits of each plane, the lowest first."""


def unpack_planes(packed: Tensor, bits: int, dim: int) -> Tensor:
    """packed int32 in planes -> int32 numbers from 0, `32 / bits` times as many along `dim`: 32 in `bits` words."""
    words = packed.movedim(dim, -1).unflatten(-1, (-1, bits))
    numbers, first = torch.zeros(*words.shape[:-1], 32, dtype=torch.int32), 0
    for width in _PLANES[bits]:
        plane = unpack_int32(words[..., first : first + width], width, -1)
        numbers |= plane << first
        first += width
    return numbers.flatten(-2).movedim(-1, dim)


def pack_int32(numbers: Tensor, bits: int) -> Tensor:
    """numbers [O, I] from 0 -> [O, ceil(I * bits / 32)] int32; what `unpack_int32` takes along dim 1."""
    count = 32 // bits
    padded = torch.nn.functional.pad(numbers.long(), (0, -numbers.shape[1] % count)).unflatten(1, (-1, count))
    words = (padded << torch.arange(0, 32, bits)).sum(dim=2)
    return torch.where(words > 0x7FFFFFFF, words - (1 << 32), words).int()


def read_gptq(
    qweight: Tensor, qzeros: Tensor | None, scales: Tensor, g_idx: Tensor | None, *,
    bits: int, zero_offset: int, name: str, planes: bool = False, symmetric: bool | None = False,
) -> GroupedWeight:  # fmt: skip
    """See above.

    Args:
        qzeros: None where there are none, of symmetric weights.
        zero_offset: What stored zero points lack.
        name: Of the layer, for messages.
        symmetric: Whether the configuration says so; None where it says nothing.

    Raises:
        CheckpointError: Zero points that symmetric weights cannot have, or inputs that are not in groups.
    """
    middle, unpack = 1 << (bits - 1), unpack_planes if planes else unpack_int32
    elements = (unpack(qweight, bits, 0) - middle).to(torch.int8).T.contiguous()
    zero = None
    if qzeros is not None:
        stored = unpack(qzeros, bits, 1)
        if not _is_middle(stored, (middle - 1, middle), symmetric, name):
            zero = _or_none((stored + zero_offset - middle).to(torch.int16).T.contiguous())
    return _in_order(GroupedWeight(elements, scales.T.contiguous(), zero, bits=bits), g_idx, name)


def _is_middle(stored: Tensor, middles: tuple[int, ...], symmetric: bool | None, name: str) -> bool:
    """Whether zero points that may be symmetric ones are: the same everywhere, of one of the values that stand for the
    middle, or 0, which some tools leave there.

    Args:
        symmetric: Whether the configuration says so; None where it says nothing.
    """
    if symmetric is False or not stored.numel():
        return False
    if are_absent():  # no other values pass
        return symmetric is True
    value = int(stored.flatten()[0])
    if not bool((stored == value).all()):
        return False
    if value in middles or (symmetric and value == 0):
        return True
    if symmetric:
        raise CheckpointError(
            f"{name}: its zero points are all {value}, but quantization_config says that it is symmetric, where they "
            f"are {' or '.join(map(str, middles))}; the files or the configuration are of another checkpoint"
        )
    return False


def read_awq(
    qweight: Tensor, qzeros: Tensor | None, scales: Tensor, *, symmetric: bool | None = False, name: str = ""
) -> GroupedWeight:
    """See above; arguments as those of `read_gptq`."""

    def unpack(packed: Tensor) -> Tensor:
        numbers = unpack_int32(packed, 4, 1).view(packed.shape[0], -1, 8)
        placed = torch.empty_like(numbers)
        placed[:, :, list(AWQ_ORDER)] = numbers
        return placed.view(packed.shape[0], -1).T - 8

    zero = None
    if qzeros is not None:
        stored = unpack(qzeros)
        if not _is_middle(stored + 8, (8,), symmetric, name):
            zero = _or_none(stored.to(torch.int16).contiguous())
    return GroupedWeight(unpack(qweight).to(torch.int8).contiguous(), scales.T.contiguous(), zero, bits=4)


def read_packed(
    packed: Tensor, scale: Tensor, zero_point: Tensor | None, g_idx: Tensor | None, *, bits: int, inputs: int, name: str
) -> GroupedWeight:
    """See above. inputs: of the layer; packed numbers may be a few more."""
    middle = 1 << (bits - 1)
    elements = (unpack_int32(packed, bits, 1)[:, :inputs] - middle).to(torch.int8)
    zero = None
    if zero_point is not None:
        zero = _or_none((unpack_int32(zero_point, bits, 0)[: scale.shape[0]] - middle).to(torch.int16))
    return _in_order(GroupedWeight(elements, scale, zero, bits=bits), g_idx, name)


def read_int8(weight: Tensor, scale: Tensor, zero: Tensor | None) -> GroupedWeight:
    """weight [O, I] int8, scale and zero [O, G], [O] or [1]."""
    scale = scale.expand(len(weight), -1) if scale.ndim == 2 else scale.expand(len(weight))[:, None]
    if zero is not None:
        zero = (zero if zero.ndim == 2 else zero[:, None]).expand(scale.shape).to(torch.int16)
    return GroupedWeight(weight, scale, zero)


def _or_none(zero: Tensor) -> Tensor | None:
    return zero if ask(ZERO_POINTS, zero.any()) else None


def _in_order(weight: GroupedWeight, g_idx: Tensor | None, name: str) -> GroupedWeight:
    """Inputs group by group, where the checkpoint says of each which group it is in."""
    inputs, num_groups = weight.elements.shape[1], weight.scale.shape[1]
    if inputs % num_groups:
        raise CheckpointError(f"{name}: {inputs} inputs cannot be cut into {num_groups} groups; get the files again")
    expected = torch.arange(inputs) // (inputs // num_groups)
    if g_idx is None or (not are_absent() and torch.equal(g_idx.long(), expected)):
        return weight
    groups, order = torch.sort(g_idx.long(), stable=True)
    if not are_absent() and not torch.equal(groups, expected):
        raise CheckpointError(
            f"{name}: g_idx does not put {inputs // num_groups} inputs into each of {num_groups} groups; "
            "the checkpoint is damaged, get the files again"
        )
    return weight._replace(elements=weight.elements[:, order], order=order)


def grouped_weights(weight: GroupedWeight, dtype: torch.dtype, name: str) -> dict[str, Tensor]:
    """As op `grouped_linear` takes them, and "order" where there is one. Scales that `dtype` cannot hold exactly are
    kept in float32."""
    elements, scale, zero, order, size, bits = weight
    size = size or elements.shape[1] // scale.shape[1]
    if size > 128 or scale.shape[1] == 1:  # of the same scale: as many smaller groups as the op takes
        if scale.shape[1] > 1 and size % 128:
            raise CheckpointError(f"{name}: groups of {size} inputs are not a multiple of 128")
        repeats = -(-size // 128)
        scale = scale.repeat_interleave(repeats, dim=1)
        zero = None if zero is None else zero.repeat_interleave(repeats, dim=1)
    weights = {
        "weight": pack_int4(elements) if bits <= 4 else elements.contiguous(),
        "scale": block_groups(exact_scale(scale, dtype)),
    }
    if zero is not None:
        weights["zero"] = block_groups(zero)
    return weights if order is None else {**weights, "order": order}


def exact_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale in `dtype` where that holds it exactly, else in float32."""
    narrow = scale.to(dtype)
    return narrow if ask(EXACT_SCALES, (narrow.float() == scale.float()).all()) else scale.float()
