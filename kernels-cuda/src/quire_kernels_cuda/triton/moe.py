"""The experts of a mixture-of-experts layer: pairs of token and expert sorted by expert, then two grouped products.

A few pairs are sorted by counting, in one kernel: where a pair goes is how many come before it, which a program finds
by looking at all of them. A tile of pairs belongs to one expert; tiles are counted from the sorted pairs on the device,
so grids depend on the number of pairs only. Experts stay where they are: kernels get a table of addresses, one for each
matrix. What the experts of a token say is added in the order of their numbers.

Shape legend: T tokens, K experts per token, P = T * K pairs, E experts, I width of the network, M within an expert.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_interfaces import ConfigError
from quire_kernels_cuda.builds import Calls, NetworkShape
from quire_kernels_cuda.platform import NVIDIA, LaunchConfig, Platform
from quire_kernels_cuda.recording import address_of
from quire_kernels_cuda.targets import Target
from quire_kernels_cuda.triton.block_linear import bytes_of_turn, known_format, numbers_in_byte
from quire_kernels_cuda.triton.blocks import block_sum
from quire_kernels_cuda.triton.gates import activate
from quire_kernels_cuda.triton.matmul import tile_sum
from quire_ops import (
    CACHE_TORCH_DTYPES,
    EXPERT_ACTIVATIONS,
    Experts,
    LinearWeights,
    RunExperts,
    implements,
    is_in_blocks,
    ops,
)
from quire_ops.block_formats import BLOCK_FORMATS, block_header
from quire_ops.grouped import block_groups, group_size_of

__all__ = [
    "MOST_COUNTED",
    "add_experts_kernel",
    "calls",
    "expert_down_kernel",
    "expert_gate_kernel",
    "fused_moe",
    "sort_pairs",
    "sort_pairs_kernel",
]

MOST_COUNTED = 4096
"""Pairs up to which they are sorted by counting, whose work grows with their square; beyond, torch sorts them."""

_MINE, _OTHERS = 32, 128


@triton.jit(do_not_specialize=["num_pairs"])
def sort_pairs_kernel(
    ids, order, places, starts, num_pairs, num_experts, MINE: tl.constexpr, OTHERS: tl.constexpr
):  # fmt: skip
    """See `sort_pairs`. Grid: pieces of MINE pairs, then pieces of as many experts, whose first pairs are counted."""
    piece = tl.program_id(0)
    pair_pieces = tl.cdiv(num_pairs, MINE)
    lane = tl.arange(0, MINE)
    before = tl.zeros([MINE], dtype=tl.int32)
    if piece < pair_pieces:
        pair = piece * MINE + lane
        mine = tl.load(ids + pair, mask=pair < num_pairs, other=0)
        for begin in range(0, num_pairs, OTHERS):
            other = begin + tl.arange(0, OTHERS)
            its = tl.load(ids + other, mask=other < num_pairs, other=0x7FFFFFFF)
            is_before = (its[None, :] < mine[:, None]) | (
                (its[None, :] == mine[:, None]) & (other[None, :] < pair[:, None])
            )
            before += tl.sum(is_before.to(tl.int32), 1)
        tl.store(places + pair, before.to(tl.int64), mask=pair < num_pairs)
        tl.store(order + before, pair.to(tl.int64), mask=pair < num_pairs)
    else:
        expert = (piece - pair_pieces) * MINE + lane
        for begin in range(0, num_pairs, OTHERS):
            other = begin + tl.arange(0, OTHERS)
            its = tl.load(ids + other, mask=other < num_pairs, other=0x7FFFFFFF)
            before += tl.sum((its[None, :] < expert[:, None]).to(tl.int32), 1)
        tl.store(starts + expert, before, mask=expert <= num_experts)


@triton.jit
def _tile_of_expert(starts, num_experts, tile, BM: tl.constexpr, EXPERTS: tl.constexpr):
    """(expert, first pair, end of the expert's pairs) of a tile; first = end where there is nothing to do.

    starts [E + 1]: where each expert's pairs begin among the sorted ones.
    """
    expert = tl.arange(0, EXPERTS)
    begin = tl.load(starts + expert, mask=expert < num_experts, other=0)
    end = tl.load(starts + expert + 1, mask=expert < num_experts, other=0)
    num_tiles = tl.where(expert < num_experts, (end - begin + BM - 1) // BM, 0)
    tiles_after = tl.cumsum(num_tiles, 0)
    mine = (tiles_after - num_tiles <= tile) & (tile < tiles_after)
    index = tl.sum(tl.where(mine, expert, 0), 0)
    first = tl.sum(tl.where(mine, begin + (tile - tiles_after + num_tiles) * BM, 0), 0)
    return index, first, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit
def _address(table, index, like, ALIGNED: tl.constexpr = True):
    """The address in a table of int64 as a pointer to elements like those behind `like`."""
    pointer = tl.load(table + index).to(tl.pointer_type(like.dtype.element_ty))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _expert_sum(
    x, x_place, inside_row, table, scales, zeros, biases, weight_like, scale_like, zero_like, expert, outputs,
    inside_out, num_outputs, inputs, num_groups, row_bytes,
    FORM: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, FACTOR: tl.constexpr,
    ALIGNED: tl.constexpr, IN_PLANES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """[BM, BN] float32: a linear layer of an expert, applied to rows of x. IN_PLANES: `num_groups` are turns."""
    weight = _address(table, expert, weight_like, ALIGNED)
    scale = _address(scales, expert, scale_like, False) if FORM != "plain" else scale_like
    zero = _address(zeros, expert, zero_like, False) if HAS_ZERO else zero_like
    if IN_PLANES:  # BK: bytes of a turn
        total = block_sum(
            x, x_place, inside_row, weight, scale, outputs, inside_out, inputs, 0, num_groups, row_bytes,
            FORM, BM, BN, BK // 16,
        )  # fmt: skip
    else:
        total = tile_sum(
            x, x_place, inside_row, weight, scale, zero, outputs, inside_out, num_outputs, inputs, 0, inputs,
            num_groups, row_bytes, FORM, GROUP, HAS_ZERO, BM, BN, BK,
        )  # fmt: skip
    total = total * FACTOR
    if FORM != "plain" and GROUP == 0 and not IN_PLANES:
        total = total * tl.load(scale + outputs, mask=inside_out, other=0).to(tl.float32)[None, :]
    if HAS_BIAS:
        bias = _address(biases, expert, x, False)
        total = total + tl.load(bias + outputs, mask=inside_out, other=0).to(tl.float32)[None, :]
    return total


@triton.jit
def expert_gate_kernel(
    x, order, starts, inner, gates, gate_scales, gate_zeros, gate_biases, ups, up_scales, up_zeros, up_biases,
    weight_like, scale_like, zero_like, num_experts, top_k, inputs, num_outputs, x_row, num_groups, row_bytes, limit,
    FORM: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, FACTOR: tl.constexpr,
    ALIGNED: tl.constexpr, IN_PLANES: tl.constexpr, ACTIVATION: tl.constexpr, EXPERTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """inner [P, M] = act(gate(x)) * up(x), in the order of the sorted pairs. order [P]: pair, token * K + slot."""
    expert, first, end = _tile_of_expert(starts, num_experts, tl.program_id(1), BM, EXPERTS)
    if first >= end:
        return
    pair = first + tl.arange(0, BM)
    inside_row = pair < end
    token = tl.load(order + pair, mask=inside_row, other=0) // top_k
    outputs = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    inside_out = outputs < num_outputs
    gate = _expert_sum(
        x, token * x_row, inside_row, gates, gate_scales, gate_zeros, gate_biases, weight_like, scale_like, zero_like,
        expert, outputs, inside_out, num_outputs, inputs, num_groups, row_bytes, FORM, GROUP, HAS_ZERO, HAS_BIAS,
        FACTOR, ALIGNED, IN_PLANES, BM, BN, BK,
    )  # fmt: skip
    up = _expert_sum(
        x, token * x_row, inside_row, ups, up_scales, up_zeros, up_biases, weight_like, scale_like, zero_like,
        expert, outputs, inside_out, num_outputs, inputs, num_groups, row_bytes, FORM, GROUP, HAS_ZERO, HAS_BIAS,
        FACTOR, ALIGNED, IN_PLANES, BM, BN, BK,
    )  # fmt: skip
    if ACTIVATION == "swigluoai":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        gated = gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    else:
        gated = activate(gate, ACTIVATION) * up
    place = pair.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(inner + place, gated.to(inner.dtype.element_ty), mask=inside_row[:, None] & inside_out[None, :])


@triton.jit
def expert_down_kernel(
    inner, starts, result, downs, down_scales, down_zeros, down_biases, weight_like, scale_like, zero_like,
    num_experts, inputs, num_outputs, num_groups, row_bytes,
    FORM: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, FACTOR: tl.constexpr,
    ALIGNED: tl.constexpr, IN_PLANES: tl.constexpr, EXPERTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """result [P, I] float32 = down(inner), in the order of the sorted pairs."""
    expert, first, end = _tile_of_expert(starts, num_experts, tl.program_id(1), BM, EXPERTS)
    if first >= end:
        return
    pair = first + tl.arange(0, BM)
    inside_row = pair < end
    outputs = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    inside_out = outputs < num_outputs
    total = _expert_sum(
        inner, pair.to(tl.int64) * inputs, inside_row, downs, down_scales, down_zeros, down_biases, weight_like,
        scale_like, zero_like, expert, outputs, inside_out, num_outputs, inputs, num_groups, row_bytes, FORM, GROUP,
        HAS_ZERO, HAS_BIAS, FACTOR, ALIGNED, IN_PLANES, BM, BN, BK,
    )  # fmt: skip
    place = pair.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(result + place, total, mask=inside_row[:, None] & inside_out[None, :])


@triton.jit
def add_experts_kernel(result, places, weights, out, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """out [T, I]: what a token's experts say, times their weights. places [P]: where a pair is among the sorted ones;
    a lower place is a lower expert."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    last = tl.full([], -1, tl.int64)
    for _ in tl.static_range(TOP_K):
        following = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
        weight = tl.full([], 0.0, tl.float32)
        for slot in tl.static_range(TOP_K):
            place = tl.load(places + token * TOP_K + slot)
            is_next = (place > last) & (place < following)
            following = tl.where(is_next, place, following)
            weight = tl.where(is_next, tl.load(weights + token * TOP_K + slot), weight)
        total += weight * tl.load(result + following * size + col, mask=col < size, other=0.0)
        last = following
    tl.store(out + token * size + col, total.to(out.dtype.element_ty), mask=col < size)


class _Matrices(NamedTuple):
    """Matrices of all experts in one role: tables [E] of addresses on the device, and what they have in common."""

    weights: Tensor
    scales: Tensor
    zeros: Tensor
    biases: Tensor
    like: LinearWeights
    """Any of them: dtypes and sizes."""
    aligned: bool

    @property
    def in_planes(self) -> bool:
        """Whether they are kept in the blocks of a file."""
        return is_in_blocks(self.like)

    @property
    def form(self) -> str:
        if self.in_planes:
            assert self.like.scale is not None
            return known_format(self.like.scale)
        forms = {torch.int8: "int8", torch.uint8: "int4", torch.float8_e4m3fn: "fp8"}
        return forms.get(self.like.weight.dtype, "plain")

    def constants(self, inputs: int) -> dict[str, object]:
        """What kernels of this form are compiled for."""
        scale = self.like.scale
        group = group_size_of(inputs, scale.shape[1]) if scale is not None and scale.ndim == 3 else 0
        return {
            "FORM": self.form,
            "GROUP": group,
            "HAS_ZERO": self.like.zero is not None,
            "HAS_BIAS": self.like.bias is not None,
            "FACTOR": 256.0 if self.form == "fp8" else 1.0,
            "ALIGNED": self.aligned,
            "IN_PLANES": self.in_planes,
            "BK": self._inputs_of_turn(group),
        }

    def _inputs_of_turn(self, group: int) -> int:
        if self.in_planes:
            return bytes_of_turn(self.form, is_row=False)
        return 128 if self.form == "int4" else min(group or 64, 64)


def _matrices(layers: tuple[LinearWeights, ...]) -> _Matrices:
    def table(tensors: list[Tensor | None]) -> Tensor:
        addresses = [0 if tensor is None else address_of(tensor) for tensor in tensors]
        return torch.tensor(addresses, dtype=torch.int64, device=layers[0].weight.device)

    if is_in_blocks(layers[0]):
        forms = sorted({known_format(layer.scale) for layer in layers if layer.scale is not None})
        if len(forms) > 1:
            raise ConfigError(f"experts are kept in {' and '.join(forms)}; the kernel takes one form of a role")
    weights: list[Tensor | None] = [layer.weight for layer in layers]
    row_bytes = layers[0].weight.stride(0) * layers[0].weight.element_size()
    return _Matrices(
        table(weights),
        table([layer.scale for layer in layers]),
        table([layer.zero for layer in layers]),
        table([layer.bias for layer in layers]),
        layers[0],
        row_bytes % 16 == 0 and all(address_of(layer.weight) % 16 == 0 for layer in layers),
    )


@implements(ops.fused_moe)
def fused_moe(experts: Experts, *, platform: Platform = NVIDIA) -> RunExperts:
    """Op `fused_moe`. The experts' tensors must stay where they are."""
    if experts.activation not in EXPERT_ACTIVATIONS:
        choices = ", ".join(EXPERT_ACTIVATIONS)
        raise ConfigError(f"experts have no activation {experts.activation!r}; choose one of {choices}")
    gate, up, down = _matrices(experts.gate), _matrices(experts.up), _matrices(experts.down)
    if gate.form != up.form:
        raise ConfigError(
            f"gate is kept in {gate.form} and up in {up.form}; the kernel of experts takes one form of both"
        )
    num_experts = len(experts.gate)
    inner_size = experts.gate[0].weight.shape[0]
    target = platform.target_of(experts.gate[0].weight.device)

    def run(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        num_tokens, size = x.shape
        top_k = topk_ids.shape[1]
        out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
        if not num_tokens:
            return out
        x = x if x.stride(-1) == 1 else x.contiguous()
        order, places, starts = sort_pairs(topk_ids.flatten(), num_experts)
        num_pairs = num_tokens * top_k
        sizes = {
            "pairs": triton.next_power_of_2(num_pairs), "experts": num_experts, "inputs": size, "inner": inner_size
        }  # fmt: skip
        constants = gate.constants(size)
        config = _default_cut(num_pairs, num_experts, gate.form, target)
        if not gate.in_planes:  # which are not tuned
            config = platform.config(
                "fused_moe", x.device, config, sizes=sizes, dtype=x.dtype, form=gate.form, group=constants["GROUP"],
                scale_dtype=_likes(gate, x)[1].dtype, zero=constants["HAS_ZERO"], bias=constants["HAS_BIAS"],
                activation=experts.activation,
            )  # fmt: skip
        rows = config.blocks["BM"]
        num_tiles = min(num_pairs, triton.cdiv(num_pairs, rows) + num_experts)
        cut = {
            "EXPERTS": triton.next_power_of_2(num_experts), **config.blocks,
            "num_warps": config.num_warps, "num_stages": config.num_stages,
        }  # fmt: skip
        inner = torch.empty((num_pairs, inner_size), dtype=x.dtype, device=x.device)
        expert_gate_kernel[(triton.cdiv(inner_size, cut["BN"]), num_tiles)](
            x, order, starts, inner,
            gate.weights, gate.scales, gate.zeros, gate.biases, up.weights, up.scales, up.zeros, up.biases,
            *_likes(gate, x), num_experts, top_k, size, inner_size, x.stride(0), _num_groups(gate, size),
            gate.like.weight.shape[1], experts.limit,
            ACTIVATION=experts.activation, **constants, **cut,
        )  # fmt: skip
        result = torch.empty((num_pairs, size), dtype=torch.float32, device=x.device)
        expert_down_kernel[(triton.cdiv(size, cut["BN"]), num_tiles)](
            inner, starts, result, down.weights, down.scales, down.zeros, down.biases, *_likes(down, x),
            num_experts, inner_size, size, _num_groups(down, inner_size), down.like.weight.shape[1],
            **down.constants(inner_size), **cut,
        )  # fmt: skip
        add_experts_kernel[(num_tokens, triton.cdiv(size, 1024))](
            result, places, topk_weights.contiguous(), out, size, TOP_K=top_k, BLOCK=1024, num_warps=4
        )
        return out

    return run


def sort_pairs(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs sorted by expert, those of one expert in their order.

    Args:
        ids: [P] int64, the expert of each pair.

    Returns:
        order [P] int64, the pair at each place; places [P] int64, the place of each pair; starts [E + 1] int32, the
        first place of each expert, and the end.
    """
    num_pairs = len(ids)
    if num_pairs > MOST_COUNTED:
        sorted_ids, order = torch.sort(ids, stable=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(num_pairs, device=ids.device))
        starts = torch.searchsorted(sorted_ids, torch.arange(num_experts + 1, device=ids.device), out_int32=True)
        return order, places, starts
    order, places = torch.empty_like(ids), torch.empty_like(ids)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
    pieces = triton.cdiv(num_pairs, _MINE) + triton.cdiv(num_experts + 1, _MINE)
    sort_pairs_kernel[(pieces,)](
        ids, order, places, starts, num_pairs, num_experts, MINE=_MINE, OTHERS=_OTHERS, num_warps=4
    )
    return order, places, starts


def _default_cut(num_pairs: int, num_experts: int, form: str, target: Target) -> LaunchConfig:
    is_narrow = target.has_few_registers
    rows = 16 if num_pairs <= 16 * num_experts or is_narrow else 64
    if is_narrow:
        outputs = 16 if form == "int4" and target.holds_operands_twice else 32
        return LaunchConfig(blocks={"BM": rows, "BN": outputs}, num_warps=8, num_stages=1)
    outputs = 32 if form in BLOCK_FORMATS else 64  # what is taken apart needs registers, too
    return LaunchConfig(blocks={"BM": rows, "BN": outputs}, num_warps=4, num_stages=3 if target.vendor == "cuda" else 2)


def _likes(matrices: _Matrices, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors whose dtypes say what is behind the addresses; nothing is read from them."""
    like = matrices.like
    weight = like.weight.view(torch.uint8) if matrices.form == "fp8" else like.weight
    return weight, x if like.scale is None else like.scale, x if like.zero is None else like.zero


def _num_groups(matrices: _Matrices, inputs: int) -> int:
    """Groups of inputs; turns of a kernel, of weights in planes."""
    if matrices.in_planes:
        form = matrices.form
        return int(triton.cdiv(inputs // numbers_in_byte(form), bytes_of_turn(form, is_row=False)))
    scale = matrices.like.scale
    return scale.shape[1] if scale is not None and scale.ndim == 3 else 1


def calls(shape: NetworkShape, platform: Platform) -> Calls:
    """Experts with few tokens each and with many."""
    if not shape.num_experts:
        return
    dtype, hidden, inner = CACHE_TORCH_DTYPES[shape.dtype], shape.hidden_size, shape.intermediate_size

    def empty(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    def matrix(outputs: int, inputs: int) -> LinearWeights:
        if shape.weights == "int8":
            return LinearWeights(empty(outputs, inputs, dtype=torch.int8), None, empty(outputs))
        if shape.weights == "int4":
            packed = empty(outputs, inputs // 2, dtype=torch.uint8)
            return LinearWeights(packed, None, block_groups(empty(outputs, inputs // 128)))
        if shape.weights == "blocks":
            packed = empty(outputs, BLOCK_FORMATS["Q4_K"].row_bytes(inputs), dtype=torch.uint8)
            return LinearWeights(packed, None, block_header("Q4_K", planes=True).to("meta"))
        return LinearWeights(empty(outputs, inputs))

    up, down = (matrix(inner, hidden),) * shape.num_experts, (matrix(hidden, inner),) * shape.num_experts
    run = fused_moe(Experts(gate=up, up=up, down=down, activation="silu"), platform=platform)
    for use, tokens in (("few", 16), ("many", 1024)):
        ids, weights = empty(tokens, 8, dtype=torch.int64), empty(tokens, 8, dtype=torch.float32)
        label = f"{use} tokens {shape.num_experts} experts {shape.weights} {shape.dtype} {hidden} {inner}"
        yield label, partial(run, empty(tokens, hidden), ids, weights)
