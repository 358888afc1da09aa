"""Products with weights in planes, and rows of embeddings in them (`quire_ops.block_formats`).

One row is multiplied without matrix units, where weights were taken apart; several meet a tile of weights rounded to
their dtype. Where there are too few tiles to keep a GPU busy, inputs are divided among several programs (split-K),
whose float32 parts `add_splits_kernel` adds in a fixed order.

Shape legend: N rows, I inputs, O outputs. BM, BN: rows and outputs of a tile; RUNS: runs of 16 bytes of a turn.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_interfaces import ConfigError
from quire_kernels_cuda.builds import Calls, NetworkShape
from quire_kernels_cuda.platform import NVIDIA, Platform, num_multiprocessors
from quire_kernels_cuda.triton.blocks import block_constants, block_part, block_sum, first_input
from quire_kernels_cuda.triton.matmul import FEW_ROWS, MatmulTile, add_splits_kernel, choose_splits, choose_tile
from quire_ops import CACHE_TORCH_DTYPES, LinearWeights, implements, is_in_blocks, ops
from quire_ops.block_formats import BLOCK_FORMATS, block_header, format_in_planes
from quire_ops.quantized_embedding import torch_quantized_embedding

__all__ = [
    "block_embedding_kernel",
    "block_linear",
    "block_matmul_kernel",
    "block_row_kernel",
    "bytes_of_turn",
    "calls",
    "known_format",
    "numbers_in_byte",
    "quantized_embedding",
    "run_block_matmul",
]


_WITHOUT_OFFSET = frozenset({"NVFP4", "MXFP4", "TABLE4", "IQ4_NL", "IQ4_XS"})
"""Formats whose numbers are floats, or of a table."""
_IN_TABLE = ("NVFP4", "Q3_K", "Q4_K")
"""Formats that are built ahead of time: of few instructions, of most, and with minimums."""


@triton.jit(do_not_specialize=["num_rows"])
def block_matmul_kernel(
    x, weight, header, bias, out, num_rows, num_outputs, inputs, x_row, row_bytes, split_turns, num_turns,
    FORM: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """out [N, O] = x @ weight.T + bias, or with several splits [NUM_SPLITS, N, O] float32 parts of it.

    Grid: (tiles of rows, tiles of outputs, splits of `split_turns` turns).
    """
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    outputs = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    split = tl.program_id(2)
    inside_row, inside_out = row < num_rows, outputs < num_outputs
    first = split * split_turns
    last = tl.minimum(first + split_turns, num_turns)
    total = block_sum(
        x, row.to(tl.int64) * x_row, inside_row, weight, header, outputs, inside_out, inputs, first, last, row_bytes,
        FORM, BM, BN, RUNS,
    )  # fmt: skip
    if HAS_BIAS:
        total = total + tl.load(bias + outputs, mask=inside_out, other=0).to(tl.float32)[None, :]
    place = (split.to(tl.int64) * num_rows + row)[:, None] * num_outputs + outputs[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside_row[:, None] & inside_out[None, :])


@triton.jit
def block_row_kernel(
    x, weight, header, bias, out, num_outputs, inputs, row_bytes, split_turns, num_turns,
    FORM: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr, BN: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """out [O] = x [I] @ weight.T + bias, or with several splits [NUM_SPLITS, O] float32 parts of it.

    HAS_OFFSET: Numbers are whole ones, which `block_part` gives with an offset.
    """
    parts: tl.constexpr = 4 if (FORM == "Q2_K" or FORM == "Q3_K") else 2
    outputs = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    split = tl.program_id(1)
    inside_out = outputs < num_outputs
    first, second = block_constants(header)
    row = weight + outputs * row_bytes
    lane = tl.arange(0, 16)
    total = tl.zeros([BN, RUNS], dtype=tl.float32)
    first_turn = split * split_turns
    for turn in range(first_turn, tl.minimum(first_turn + split_turns, num_turns)):
        byte = turn * (RUNS * 16) + tl.arange(0, RUNS) * 16
        inside = byte < inputs // parts
        mask = inside_out[:, None] & inside[None, :]
        place = row[:, None, None] + byte[None, :, None] + lane[None, None, :]
        codes = tl.load(place, mask=mask[:, :, None], other=0)
        for part in tl.static_range(parts):
            numbers, scale, offset = block_part(
                codes, row, byte, mask, inputs, header, first, second, part, FORM, False
            )
            x_at = x + tl.multiple_of(first_input(byte, part, FORM), 16)[:, None] + lane[None, :]
            token = tl.load(x_at, mask=inside[:, None], other=0.0).to(tl.float32)
            total += scale * tl.sum(numbers * token[None, :, :], 2)
            if HAS_OFFSET:
                total += offset * tl.sum(token, 1)[None, :]
    result = tl.sum(total, 1)
    if HAS_BIAS:
        result += tl.load(bias + outputs, mask=inside_out, other=0).to(tl.float32)
    tl.store(out + split.to(tl.int64) * num_outputs + outputs, result.to(out.dtype.element_ty), mask=inside_out)


@triton.jit
def block_embedding_kernel(
    ids, weight, header, out, size, row_bytes, FORM: tl.constexpr, RUNS: tl.constexpr
):  # fmt: skip
    """out [T, size] = rows `ids` of the table; a program takes a turn of a row."""
    parts: tl.constexpr = 4 if (FORM == "Q2_K" or FORM == "Q3_K") else 2
    token = tl.program_id(0).to(tl.int64)
    first, second = block_constants(header)
    row = weight + (tl.load(ids + token).to(tl.int64) + tl.zeros([1], tl.int64)) * row_bytes
    lane = tl.arange(0, 16)
    byte = tl.program_id(1) * (RUNS * 16) + tl.arange(0, RUNS) * 16
    mask = (byte < size // parts)[None, :]
    place = row[:, None, None] + byte[None, :, None] + lane[None, None, :]
    codes = tl.load(place, mask=mask[:, :, None], other=0)
    for part in tl.static_range(parts):
        numbers, scale, offset = block_part(codes, row, byte, mask, size, header, first, second, part, FORM, True)
        values = numbers * scale[:, :, None] + offset[:, :, None]
        at = first_input(byte, part, FORM)[None, :, None] + lane[None, None, :]
        tl.store(out + token * size + at, values.to(out.dtype.element_ty), mask=mask[:, :, None])


def known_format(header: Tensor) -> str:
    """The format of a weight in planes.

    Raises:
        ConfigError: The header is of a weight in blocks.
    """
    name = format_in_planes(header)
    if name is None:
        raise ConfigError("kernels of GPUs take weights in planes, and this one is in blocks; use `in_planes` on it")
    return name


def numbers_in_byte(form: str) -> int:
    """Of the first plane."""
    return 4 if form in ("Q2_K", "Q3_K") else 2


def bytes_of_turn(form: str, *, is_row: bool) -> int:
    """Bytes of the first plane that a turn reads of an output: of 256 inputs for one row and where numbers have 2 bits,
    else of 128."""
    return 64 if numbers_in_byte(form) == 4 or not is_row else 128


@implements(ops.block_linear)
def block_linear(
    x: Tensor, weight: Tensor, header: Tensor, bias: Tensor | None, *, wide: bool = False, platform: Platform = NVIDIA
) -> Tensor:
    num_rows, inputs = x.shape
    processors = num_multiprocessors(x.device)
    if num_rows == 1:
        form = known_format(header)
        tile = MatmulTile(1, 32, bytes_of_turn(form, is_row=True) * numbers_in_byte(form), 1, 4, 2)
        splits = choose_splits(tile, len(weight), inputs, processors, 1 / numbers_in_byte(form))
        tile = tile._replace(num_splits=splits)
    else:
        tile = choose_tile(num_rows, len(weight), inputs, processors, platform.target_of(x.device), grouped=True)
        if num_rows > FEW_ROWS:  # more stages of a wide tile do not fit beside what is taken apart
            tile = tile._replace(num_stages=min(tile.num_stages, 2))
    return run_block_matmul(x, weight, header, bias, out_dtype=torch.float32 if wide else x.dtype, tile=tile)


def run_block_matmul(
    x: Tensor, weight: Tensor, header: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype, tile: MatmulTile
) -> Tensor:
    """x [N, I] @ weight.T + bias -> [N, O] of `out_dtype`. tile: its `inputs` are not looked at; for one row `rows` is
    1."""
    form = known_format(header)
    x = x if x.stride(-1) == 1 else x.contiguous()
    (num_rows, inputs), num_outputs = x.shape, len(weight)
    out = torch.empty((num_rows, num_outputs), dtype=out_dtype, device=x.device)
    if not out.numel():
        return out
    turn_bytes = bytes_of_turn(form, is_row=tile.rows == 1)
    turns = triton.cdiv(inputs // numbers_in_byte(form), turn_bytes)
    split_turns = triton.cdiv(turns, tile.num_splits)
    splits, parts = triton.cdiv(turns, split_turns), out
    if splits > 1:
        parts = torch.empty((splits, num_rows, num_outputs), dtype=torch.float32, device=x.device)
    given = x if bias is None else bias  # stands where there is nothing: never read
    has_bias = bias is not None and splits == 1
    options = {"FORM": form, "HAS_BIAS": has_bias, "BN": tile.outputs, "RUNS": turn_bytes // 16,
               "num_warps": tile.num_warps, "num_stages": tile.num_stages}  # fmt: skip
    weight, tiles = weight.contiguous(), triton.cdiv(num_outputs, tile.outputs)
    if tile.rows == 1:
        block_row_kernel[(tiles, splits)](
            x,
            weight,
            header,
            given,
            parts,
            num_outputs,
            inputs,
            weight.shape[1],
            split_turns,
            turns,
            HAS_OFFSET=form not in _WITHOUT_OFFSET,
            **options,
        )
    else:
        block_matmul_kernel[(triton.cdiv(num_rows, tile.rows), tiles, splits)](
            x, weight, header, given, parts, num_rows, num_outputs, inputs, x.stride(0), weight.shape[1], split_turns,
            turns, BM=tile.rows, **options,
        )  # fmt: skip
    if splits > 1:
        add_splits_kernel[(triton.cdiv(out.numel(), 1024),)](
            parts, parts, given, out, out.numel(), num_outputs,
            NUM_SPLITS=splits, HAS_SCALE=False, HAS_BIAS=bias is not None, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return out


@implements(ops.quantized_embedding)
def quantized_embedding(ids: Tensor, weights: LinearWeights, size: int, dtype: torch.dtype) -> Tensor:
    """Tables in planes; others, whose forms can be read with no wait for the device, through torch."""
    if not is_in_blocks(weights):
        return torch_quantized_embedding(ids, weights, size, dtype)
    assert weights.scale is not None
    form = known_format(weights.scale)
    out = torch.empty((len(ids), size), dtype=dtype, device=weights.weight.device)
    if out.numel():
        turn_bytes, table = bytes_of_turn(form, is_row=True), weights.weight.contiguous()
        turns = triton.cdiv(size // numbers_in_byte(form), turn_bytes)
        block_embedding_kernel[(len(ids), turns)](
            ids, table, weights.scale, out, size, table.shape[1], FORM=form, RUNS=turn_bytes // 16, num_warps=1
        )
    return out


def calls(shape: NetworkShape, platform: Platform) -> Calls:
    """In some formats: one row, few rows and many; and an embedding."""
    if shape.weights != "blocks" or shape.num_experts:
        return
    dtype, size = CACHE_TORCH_DTYPES[shape.dtype], shape.hidden_size

    def empty(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    for form in _IN_TABLE:
        header = block_header(form, planes=True).to("meta")
        # Enough outputs to need no splits.
        weight = empty(65536, BLOCK_FORMATS[form].row_bytes(size), dtype=torch.uint8)
        for use, rows in (("one row", 1), ("few rows", 16), ("many rows", 512)):
            call = partial(block_linear, empty(rows, size), weight, header, None, platform=platform)
            yield f"{form} {shape.dtype} {use}", call
    table, ids = LinearWeights(weight, scale=header), empty(16, dtype=torch.int64)
    yield f"{form} {shape.dtype}", partial(quantized_embedding, ids, table, size, dtype)
