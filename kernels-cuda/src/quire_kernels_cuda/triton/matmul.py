"""Products of few or many rows with a weight: plain, int8, fp8 and int4 weights that are widened in registers.

A program makes a tile of the result [BM, BN] from a stretch of the inputs. Where there are too few tiles to keep a GPU
busy, inputs are divided among NUM_SPLITS programs (split-K), whose float32 parts a second kernel adds in a fixed order:
no atomic additions, so a result is the same each time. Scales are applied to float32 sums, so that what is multiplied
are exact whole numbers.

Shape legend: N rows, I inputs, O outputs, G groups of inputs that share a scale. BM, BN, BK: rows, outputs and inputs
of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels_cuda.platform import NVIDIA, LaunchConfig, Platform, num_multiprocessors
from quire_kernels_cuda.targets import Target
from quire_kernels_cuda.triton.row_matmul import row_matmul_kernel
from quire_ops.grouped import group_size_of

__all__ = [
    "FEW_ROWS",
    "MatmulTile",
    "add_splits_kernel",
    "choose_row_tile",
    "choose_tile",
    "matmul_kernel",
    "run_matmul",
    "tile_sum",
    "weight_tile",
]

FEW_ROWS = 32
"""Rows up to which a product is bound by reading the weight."""


@triton.jit
def weight_tile(weight, outputs, inside_out, col, inside_in, row_bytes, FORM: tl.constexpr, dtype: tl.constexpr):
    """[BN, BK] of `dtype`: elements of a weight, their scales not applied; zeros outside.

    FORM: "plain", "int8", or "fp8", whose elements are taken as bits: with e4m3's exponent in the place of float16's
    they stand for numbers 256 times smaller, exactly, on GPUs that know fp8 and on those that do not.
    """
    mask = inside_out[:, None] & inside_in[None, :]
    elements = tl.load(weight + outputs[:, None] * row_bytes + col[None, :], mask=mask, other=0)
    if FORM == "fp8":
        bits = elements.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.uint16)
        result = half.to(tl.float16, bitcast=True).to(dtype)
    elif FORM == "int8":
        result = elements.to(tl.float32).to(dtype)
    else:
        result = elements
    return result  # one type for each form: an early return would be compiled along with what follows


@triton.jit
def _four_bits(bits, dtype: tl.constexpr):
    """bits - 8 of numbers from 0 to 15 (uint8), in `dtype`, exactly.

    As the lowest bits of a number whose steps are 1 they add themselves to it, which takes less than a conversion: the
    magic numbers of Kim et al. 2022 (https://arxiv.org/abs/2211.10017).
    """
    if dtype == tl.bfloat16:
        result = (bits.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0  # 2**7 + 8
    elif dtype == tl.float16:
        result = (bits.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0  # 2**10 + 8
    else:
        result = (bits.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0  # 2**23 + 8
    return result.to(dtype)


@triton.jit
def _group_scale(scale, outputs, inside_out, group, num_groups):
    """scale [ceil(O / 16), G, 16] at one group: [BN] float32."""
    place = (outputs // 16 * num_groups + group) * 16 + outputs % 16
    return tl.load(scale + place, mask=inside_out, other=0).to(tl.float32)


@triton.jit
def _grouped_dot(
    total, x_tile, elements, scale, zero, outputs, inside_out, group, num_groups,
    HAS_ZERO: tl.constexpr,
):  # fmt: skip
    """total + x_tile @ (scale * (elements - zero)).T, for inputs of one group."""
    if HAS_ZERO:
        offset = _group_scale(zero, outputs, inside_out, group, num_groups)
        elements = (elements.to(tl.float32) - offset[:, None]).to(elements.dtype)
    part = tl.dot(x_tile, tl.trans(elements), input_precision="ieee")
    return total + part * _group_scale(scale, outputs, inside_out, group, num_groups)[None, :]


@triton.jit
def tile_sum(
    x, x_place, inside_row, weight, scale, zero, outputs, inside_out, num_outputs, inputs, first, last, num_groups,
    row_bytes,
    FORM: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """[BM, BN] float32: rows of x at `x_place` [BM] times a weight's rows `outputs` [BN], over inputs first to last.

    Scales of groups are applied; scales of outputs are not.
    """
    total = tl.zeros([BM, BN], dtype=tl.float32)
    if FORM == "int4":
        # Of a piece of 128 inputs, byte 4 s + j of step s has input 4 s + j below and input 64 + 4 s + j above; the
        # bytes of 16 outputs, or of as many as there are, lie side by side in each step.
        beside = 4 * tl.minimum(16, num_outputs - outputs // 16 * 16)
        first_byte = outputs // 16 * 16 * row_bytes + outputs % 16 * 4
        step: tl.constexpr = GROUP if GROUP < 64 else 64
        for begin in range(first, last, 128):
            for part in tl.static_range(64 // step):
                lane = part * step + tl.arange(0, step)
                place = first_byte[:, None] + (begin // 8 + lane // 4)[None, :] * beside[:, None] + (lane % 4)[None, :]
                packed = tl.load(weight + place, mask=inside_out[:, None], other=0)
                for half in tl.static_range(2):
                    elements = _four_bits((packed >> (4 * half)) & 0xF, x.dtype.element_ty)
                    col = begin + 64 * half + lane
                    x_mask = inside_row[:, None] & (col < inputs)[None, :]
                    x_tile = tl.load(x + x_place[:, None] + col[None, :], mask=x_mask, other=0.0)
                    group = (begin + 64 * half + part * step) // GROUP
                    # A piece behind the last group multiplies zeros; its scale must still be one that is there.
                    group = tl.minimum(group, num_groups - 1)
                    total = _grouped_dot(
                        total, x_tile, elements, scale, zero, outputs, inside_out, group, num_groups, HAS_ZERO
                    )
    else:
        for begin in range(first, last, BK):
            col = begin + tl.arange(0, BK)
            x_mask = inside_row[:, None] & (col < inputs)[None, :]
            x_tile = tl.load(x + x_place[:, None] + col[None, :], mask=x_mask, other=0.0)
            elements = weight_tile(weight, outputs, inside_out, col, col < inputs, row_bytes, FORM, x.dtype.element_ty)
            if GROUP == 0:
                total = tl.dot(x_tile, tl.trans(elements), total, input_precision="ieee")
            else:
                total = _grouped_dot(
                    total, x_tile, elements, scale, zero, outputs, inside_out, begin // GROUP, num_groups, HAS_ZERO
                )
    return total


@triton.jit(do_not_specialize=["num_rows"])
def matmul_kernel(
    x, weight, scale, zero, bias, out,
    num_rows, num_outputs, inputs, x_row, row_bytes, num_groups, split_inputs,
    FORM: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    FACTOR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out [N, O], or with several splits [NUM_SPLITS, N, O] float32 parts. split_inputs: inputs of a split."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    outputs = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    split = tl.program_id(2)
    inside_row, inside_out = row < num_rows, outputs < num_outputs
    first = split * split_inputs
    last = tl.minimum(first + split_inputs, inputs)
    total = tile_sum(
        x, row.to(tl.int64) * x_row, inside_row, weight, scale, zero, outputs, inside_out, num_outputs, inputs, first,
        last, num_groups, row_bytes, FORM, GROUP, HAS_ZERO, BM, BN, BK,
    )  # fmt: skip
    total = total * FACTOR
    if HAS_SCALE:
        total = total * tl.load(scale + outputs, mask=inside_out, other=0).to(tl.float32)[None, :]
    if HAS_BIAS:
        total = total + tl.load(bias + outputs, mask=inside_out, other=0).to(tl.float32)[None, :]
    place = (split.to(tl.int64) * num_rows + row)[:, None] * num_outputs + outputs[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside_row[:, None] & inside_out[None, :])


@triton.jit(do_not_specialize=["num_elements"])
def add_splits_kernel(
    parts, scale, bias, out, num_elements, num_outputs,
    NUM_SPLITS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [N, O] = (sum of parts [NUM_SPLITS, N, O], first to last) * scale + bias."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < num_elements
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        total += tl.load(parts + split * num_elements + place, mask=mask, other=0.0)
    if HAS_SCALE:
        total = total * tl.load(scale + place % num_outputs, mask=mask, other=0).to(tl.float32)
    if HAS_BIAS:
        total = total + tl.load(bias + place % num_outputs, mask=mask, other=0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)


class MatmulTile(NamedTuple):
    """How a product is cut."""

    rows: int
    """1 for the kernel of one row of int4 weights."""
    outputs: int
    inputs: int
    num_splits: int
    num_warps: int
    num_stages: int

    @property
    def config(self) -> LaunchConfig:
        blocks = {"BM": self.rows, "BN": self.outputs, "BK": self.inputs, "SPLITS": self.num_splits}
        return LaunchConfig(blocks=blocks, num_warps=self.num_warps, num_stages=self.num_stages)

    @classmethod
    def of(cls, config: LaunchConfig) -> MatmulTile:
        rows, outputs, inputs, splits = (config.blocks[name] for name in ("BM", "BN", "BK", "SPLITS"))
        return cls(rows, outputs, inputs, splits, config.num_warps, config.num_stages)


def choose_tile(
    num_rows: int,
    num_outputs: int,
    inputs: int,
    num_multiprocessors: int,
    target: Target,
    *,
    grouped: bool = False,
    weight_bytes: float = 1.0,
) -> MatmulTile:
    """From what a GPU must have in flight and has of registers, not from a measurement.

    Few rows: the weight is what takes time, so narrow tiles, and splits where that pays. Many rows: wide tiles, which
    read both sides less often.

    Args:
        grouped: Scales are applied to a second sum, which takes as many registers as the first.
        weight_bytes: Of an element of the weight.
    """
    if num_rows > FEW_ROWS:
        if target.has_few_registers:
            return MatmulTile(32, 64, 32, 1, 8, 1)
        rows = 64 if grouped or num_rows <= 64 else 128
        return MatmulTile(rows, 128, 64, 1, 8, 3 if target.vendor == "cuda" else 2)
    rows = 16 if num_rows <= 16 else 32
    tile = MatmulTile(rows, 32, 128, 1, 4, 4 if target.vendor == "cuda" else 2)
    if target.has_few_registers:
        tile = MatmulTile(rows, 32, 64, 1, 8, 1)
    return tile._replace(num_splits=choose_splits(tile, num_outputs, inputs, num_multiprocessors, weight_bytes))


def choose_row_tile(num_outputs: int, inputs: int, num_multiprocessors: int) -> MatmulTile:
    """For one row of int4 weights: programs load a piece ahead."""
    tile = MatmulTile(1, 64, 128, 1, 4, 2)
    return tile._replace(num_splits=choose_splits(tile, num_outputs, inputs, num_multiprocessors, 0.5, most_outputs=64))


def choose_splits(
    tile: MatmulTile,
    num_outputs: int,
    inputs: int,
    num_multiprocessors: int,
    weight_bytes: float,
    *,
    launch_pieces: float | None = None,
    most_outputs: int = 32,
) -> int:
    """Among how many programs the inputs of a tile are divided: one, unless dividing a weight that few programs read
    saves more than the launch that adds the parts takes. By counting, not by a measurement.

    A program has as many pieces [BN, BK] of the weight under way as it has stages, in the 0.7 us that memory takes,
    whatever is beside it; until two tiles of `most_outputs` for each multiprocessor ask for all that memory gives.

    Args:
        weight_bytes: Of an element.
        launch_pieces: That a program reads in the 2.5 us of one launch more, where its stages do not say it.
    """
    tiles, pieces = -(-num_outputs // tile.outputs), inputs / tile.inputs
    most = max(1, 2 * most_outputs * num_multiprocessors // tile.outputs)
    part_pieces = 2 * 4 * tile.rows / tile.inputs / weight_bytes  # written and read again, of four bytes
    launch_pieces = 2.5 / 0.7 * tile.num_stages if launch_pieces is None else launch_pieces

    def pieces_in_turn(splits: int) -> float:
        at_once = min(tiles * splits, most)
        own = 0.0 if splits == 1 else launch_pieces + part_pieces * tiles * splits / at_once
        return pieces * tiles / at_once + own

    return min((splits for splits in (1, 2, 4, 8, 16) if splits == 1 or inputs // splits >= 512), key=pieces_in_turn)


def _tuned_tile(
    x: Tensor,
    num_outputs: int,
    form: str,
    group: int,
    scale_dtype: torch.dtype,
    out_dtype: torch.dtype,
    has_zero: bool,
    platform: Platform,
) -> MatmulTile:
    num_rows, inputs = x.shape
    processors, target = num_multiprocessors(x.device), platform.target_of(x.device)
    is_row = form == "int4" and num_rows == 1
    if is_row:
        otherwise = choose_row_tile(num_outputs, inputs, processors)
    else:
        width = {"plain": float(x.itemsize), "int4": 0.5}.get(form, 1.0)
        otherwise = choose_tile(
            num_rows, num_outputs, inputs, processors, target, grouped=group > 0, weight_bytes=width
        )
    sizes = {"rows": triton.next_power_of_2(num_rows), "outputs": num_outputs, "inputs": inputs}
    config = platform.config(
        "matmul", x.device, otherwise.config, sizes=sizes, form=form, group=group, dtype=x.dtype,
        scale_dtype=scale_dtype, out_dtype=out_dtype, zero=has_zero,
    )  # fmt: skip
    tile = MatmulTile.of(config)
    return otherwise if tile.rows == 1 and not is_row else tile  # tables answer for the nearest problem


def run_matmul(
    x: Tensor,
    weight: Tensor,
    *,
    form: str,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype,
    tile: MatmulTile | None = None,
    platform: Platform = NVIDIA,
) -> Tensor:
    """x [N, I] @ weight.T + bias -> [N, O].

    Args:
        x: Rows may be apart.
        weight: [O, I] of x's dtype ("plain"), int8, or float8_e4m3fn; or as `quire_ops.grouped` packs int4.
        form: "plain", "int8", "fp8", "int4".
        scale: None, [O], or [ceil(O / 16), G, 16].
        zero: Like a scale of groups.
        tile: None to choose one.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    num_rows, inputs = x.shape
    num_outputs = weight.shape[0]
    out = torch.empty((num_rows, num_outputs), dtype=out_dtype, device=x.device)
    if not out.numel():
        return out
    weight = weight.contiguous()
    grouped = scale is not None and scale.ndim == 3
    num_groups = scale.shape[1] if grouped and scale is not None else 1
    group = group_size_of(inputs, num_groups) if grouped else 0
    scale_dtype = x.dtype if scale is None else scale.dtype
    cut = tile or _tuned_tile(x, num_outputs, form, group, scale_dtype, out_dtype, zero is not None, platform)
    step = 128 if form == "int4" else (min(group, cut.inputs) if grouped else cut.inputs)
    split_inputs = triton.cdiv(triton.cdiv(inputs, cut.num_splits), max(step, 128)) * max(step, 128)
    splits = triton.cdiv(inputs, split_inputs)
    scales_outputs = scale is not None and not grouped
    parts = out
    if splits > 1:
        parts = torch.empty((splits, num_rows, num_outputs), dtype=torch.float32, device=x.device)
    absent = x  # stands where there is nothing: never read
    given = [absent if each is None else each for each in (scale, zero, bias)]
    if cut.rows == 1:
        row_matmul_kernel[(triton.cdiv(num_outputs, cut.outputs), splits)](
            x, weight.view(torch.int32), *given, parts,
            num_outputs, inputs, weight.shape[1] // 4, num_groups, split_inputs,
            GROUP=group, HAS_ZERO=zero is not None, HAS_BIAS=bias is not None and splits == 1,
            IS_WHOLE=inputs % 128 == 0, BN=cut.outputs, NUM_STAGES=cut.num_stages,
            num_warps=cut.num_warps, num_stages=cut.num_stages,
        )  # fmt: skip
    else:
        grid = (triton.cdiv(num_rows, cut.rows), triton.cdiv(num_outputs, cut.outputs), splits)
        matmul_kernel[grid](
            x, weight.view(torch.uint8) if form == "fp8" else weight, *given, parts,
            num_rows, num_outputs, inputs, x.stride(0), weight.shape[1], num_groups, split_inputs,
            FORM=form, GROUP=group, HAS_ZERO=zero is not None, HAS_SCALE=scales_outputs and splits == 1,
            HAS_BIAS=bias is not None and splits == 1, FACTOR=256.0 if form == "fp8" else 1.0,
            BM=cut.rows, BN=cut.outputs, BK=step,
            num_warps=cut.num_warps, num_stages=cut.num_stages,
        )  # fmt: skip
    if splits > 1:
        add_splits_kernel[(triton.cdiv(out.numel(), 1024),)](
            parts, given[0], given[2], out, out.numel(), num_outputs,
            NUM_SPLITS=splits, HAS_SCALE=scales_outputs, HAS_BIAS=bias is not None, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return out
