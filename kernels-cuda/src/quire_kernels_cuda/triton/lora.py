"""Low-rank adapters on top of a linear layer's result, tokens of different adapters in one launch.

Tokens with an adapter come sorted by slot (`LoraTokens.order`), so that a tile of BM of them has few slots: a program
walks over those that its tile has (after Punica, Chen et al. 2023, sec. 4, "SGMV"; S-LoRA, Sheng et al. 2023). One
kernel shrinks tokens to the rank, the inputs divided among programs; the other adds those parts, widens them and
changes the result in place. Grids depend on how many tokens have an adapter; which slots they have is read on the
device. Narrow matrices (int8, fp8) are widened in registers, to the bits that they would have in the network's dtype.

Shape legend: T tokens, M of them with an adapter, R largest rank, I inputs, O outputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels_cuda.builds import Calls, NetworkShape
from quire_kernels_cuda.platform import Platform, num_multiprocessors
from quire_kernels_cuda.triton.matmul import weight_tile
from quire_ops import CACHE_TORCH_DTYPES, LoraTokens, LoraWeights, implements, ops, to_device

__all__ = ["calls", "expand_kernel", "lora_linear", "shrink_kernel"]

_NO_SLOT = tl.constexpr(1 << 30)
_ROWS, _RANKS = 16, 16
"""Tokens and ranks of a tile: the least that a matrix product takes."""
_MAX_SPLITS = 16


@triton.jit
def _members(order, slots, num_members, BM: tl.constexpr):
    """Of a tile of tokens with an adapter: places in `order`, the tokens, their slots (`_NO_SLOT` behind the last)."""
    member = tl.program_id(0) * BM + tl.arange(0, BM)
    is_row = member < num_members
    token = tl.load(order + member, mask=is_row, other=0).to(tl.int64)
    return member, is_row, token, tl.load(slots + token, mask=is_row, other=_NO_SLOT)


@triton.jit(do_not_specialize=["num_members", "rank"])
def shrink_kernel(
    x, a, a_scale, order, slots, inner, num_members, rank, inputs, x_row, a_slot, a_rank, split_inputs, num_ranks,
    FORM: tl.constexpr, FACTOR: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """inner [splits, M, R] float32: parts of x @ a[slot].T. Grid: (tiles of tokens, tiles of ranks, splits).

    FORM, FACTOR: as op `weight_tile` has forms, and what its numbers are multiplied with. a_scale: [S, num_ranks], of
    forms other than "plain".
    """
    member, is_row, token, slot = _members(order, slots, num_members, BM)
    ranks = tl.program_id(1) * BR + tl.arange(0, BR)
    split = tl.program_id(2)
    first = split * split_inputs
    last = tl.minimum(first + split_inputs, inputs)
    total = tl.zeros([BM, BR], tl.float32)
    current = tl.min(slot, 0)
    while current < _NO_SLOT:
        mine = slot == current
        matrix = a + current.to(tl.int64) * a_slot
        for begin in range(first, last, BI):
            col = begin + tl.arange(0, BI)
            inside = col < last
            x_tile = tl.load(
                x + (token * x_row)[:, None] + col[None, :], mask=mine[:, None] & inside[None, :], other=0.0
            )
            a_tile = weight_tile(matrix, ranks, ranks < rank, col, inside, a_rank, FORM, tl.float32)
            if FORM != "plain":
                scale = tl.load(a_scale + current.to(tl.int64) * num_ranks + ranks, mask=ranks < rank, other=0.0)
                a_tile = (a_tile * (scale * FACTOR)[:, None]).to(x_tile.dtype)
            total = tl.dot(x_tile, tl.trans(a_tile), total, input_precision="ieee")
        current = tl.min(tl.where(slot > current, slot, _NO_SLOT), 0)
    place = (split.to(tl.int64) * num_members + member)[:, None] * rank + ranks[None, :]
    tl.store(inner + place, total, mask=is_row[:, None] & (ranks < rank)[None, :])


@triton.jit(do_not_specialize=["num_members", "rank", "num_splits"])
def expand_kernel(
    x, inner, b, b_scale, order, slots, adjusted, scale, shift, out, num_members, rank, num_splits, outputs, b_slot,
    b_rank, out_row, out_col,
    FORM: tl.constexpr, FACTOR: tl.constexpr, ADJUSTS: tl.constexpr,
    BM: tl.constexpr, BR: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """out[order] = out[order] * scale + inner @ b[slot] + shift. Grid: (tiles of tokens, tiles of outputs).

    adjusted: [S] int32, if ADJUSTS: which slots have scale and shift. b_scale: [S, O], as a_scale. x: is of the
    network's dtype.
    """
    member, is_row, token, slot = _members(order, slots, num_members, BM)
    col = tl.program_id(1) * BO + tl.arange(0, BO)
    inside = col < outputs
    cell = is_row[:, None] & inside[None, :]
    place = out + (token * out_row)[:, None] + (col * out_col)[None, :]
    total = tl.load(place, mask=cell, other=0.0).to(tl.float32)
    if ADJUSTS:
        changes = tl.load(adjusted + slot, mask=slot < _NO_SLOT, other=0) > 0
        of_slot = slot.to(tl.int64)[:, None] * outputs + col[None, :]
        mask = changes[:, None] & inside[None, :]
        total = total * tl.load(scale + of_slot, mask=mask, other=1.0) + tl.load(shift + of_slot, mask=mask, other=0.0)
    current = tl.min(slot, 0)
    while current < _NO_SLOT:
        mine = slot == current
        matrix = b + current.to(tl.int64) * b_slot
        for begin in range(0, rank, BR):
            ranks = begin + tl.arange(0, BR)
            part = mine[:, None] & (ranks < rank)[None, :]
            shrunk = tl.zeros([BM, BR], tl.float32)
            for split in range(num_splits):
                row = (member.to(tl.int64) + split * num_members)[:, None] * rank
                shrunk += tl.load(inner + row + ranks[None, :], mask=part, other=0.0)
            b_tile = weight_tile(matrix, ranks, ranks < rank, col, inside, b_rank, FORM, tl.float32)
            if FORM != "plain":
                factor = tl.load(b_scale + current.to(tl.int64) * outputs + col, mask=inside, other=0.0)
                b_tile = (b_tile * (factor * FACTOR)[None, :]).to(x.dtype.element_ty)
            total = tl.dot(shrunk.to(b_tile.dtype), b_tile, total, input_precision="ieee")
        current = tl.min(tl.where(slot > current, slot, _NO_SLOT), 0)
    tl.store(place, total.to(out.dtype.element_ty), mask=cell)


@implements(ops.lora_linear)
def lora_linear(out: Tensor, x: Tensor, weights: LoraWeights, tokens: LoraTokens) -> None:
    """Op `lora_linear`. What is shrunk is rounded to the network's dtype before it is widened."""
    rank, adjusts = weights.a.shape[1], weights.device_adjusted is not None
    if not tokens.is_fixed:
        rank, adjusts = int(weights.ranks.numpy().max()), bool(weights.adjusted.numpy().any())
    if not rank and not adjusts:
        return
    x = x if x.stride(-1) == 1 else x.contiguous()
    num_members, (inputs, outputs) = tokens.order.shape[0], (x.shape[1], out.shape[1])
    tiles, step = triton.cdiv(num_members, _ROWS), 64 if x.dtype == torch.float32 else 128
    wanted = 2 * num_multiprocessors(x.device) // max(1, tiles * triton.cdiv(rank, _RANKS))
    splits = max(1, min(_MAX_SPLITS, wanted, inputs // 256))
    split_inputs = triton.cdiv(triton.cdiv(inputs, splits), step) * step
    splits = triton.cdiv(inputs, split_inputs)
    inner = torch.empty((splits, num_members, rank), dtype=torch.float32, device=x.device)
    form, a, b, a_scale, b_scale = "plain", weights.a, weights.b, weights.scale, weights.scale
    if weights.a_scale is not None and weights.b_scale is not None:
        form, a_scale, b_scale = "int8" if a.dtype == torch.int8 else "fp8", weights.a_scale, weights.b_scale
        a, b = (each if form == "int8" else each.view(torch.uint8) for each in (a, b))
    forms = {"FORM": form, "FACTOR": 256.0 if form == "fp8" else 1.0}
    if rank:
        shrink_kernel[(tiles, triton.cdiv(rank, _RANKS), splits)](
            x, a, a_scale, tokens.order, tokens.slots, inner, num_members, rank, inputs, x.stride(0),
            *a.stride()[:2], split_inputs, a.shape[1], **forms, BM=_ROWS, BR=_RANKS, BI=step, num_warps=4, num_stages=2,
        )  # fmt: skip
    adjusted = weights.device_adjusted if tokens.is_fixed else None
    if adjusted is None:
        adjusted = to_device(weights.adjusted.numpy(), x.device) if adjusts else tokens.slots
    expand_kernel[(tiles, triton.cdiv(outputs, 128))](
        x, inner, b, b_scale, tokens.order, tokens.slots, adjusted, weights.scale, weights.shift, out, num_members,
        rank, splits, outputs, *b.stride()[:2], *out.stride(), **forms, ADJUSTS=adjusts, BM=_ROWS, BR=_RANKS, BO=128,
        num_warps=4, num_stages=2,
    )  # fmt: skip


def calls(shape: NetworkShape, platform: Platform) -> Calls:
    """Adapters that only add, such that scale too, and narrow ones."""
    if not shape.adapters:
        return

    def empty(*sizes: int, dtype: torch.dtype = CACHE_TORCH_DTYPES[shape.dtype]) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    size, numbers = shape.hidden_size, torch.ones(4, dtype=torch.int32)
    tokens = LoraTokens(slots=empty(64, dtype=torch.int32), order=empty(64, dtype=torch.int32), groups=numbers)
    x = empty(64, size)
    wide: Any = {"dtype": torch.float32}
    for use, adjusted, narrow in (
        ("", torch.zeros_like(numbers), None), (" scaled", numbers, None),
        (" int8", torch.zeros_like(numbers), torch.int8), (" fp8", torch.zeros_like(numbers), torch.float8_e4m3fn),
    ):  # fmt: skip
        matrix: Any = {} if narrow is None else {"dtype": narrow}
        scales: Any = {} if narrow is None else {"a_scale": empty(4, 16, **wide), "b_scale": empty(4, size, **wide)}
        weights = LoraWeights(
            a=empty(4, 16, size, **matrix), b=empty(4, 16, size, **matrix), ranks=16 * numbers, adjusted=adjusted,
            scale=empty(4, size, **wide), shift=empty(4, size, **wide), **scales,
        )  # fmt: skip
        yield f"{shape.dtype}{use}", partial(lora_linear, x, x, weights, tokens)
