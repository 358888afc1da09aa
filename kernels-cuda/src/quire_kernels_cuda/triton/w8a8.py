"""Products of whole numbers on matrix units, of tokens rounded to int8 (`rounding.py`); of many rows by torch's library
where it serves, whose sums the second kernel below scales.

They are summed in int32, which is exact, so that a row's result does not depend on its neighbours. Where too few tiles
keep a GPU busy, inputs are divided among several programs (split-K), whose sums a second kernel adds:
in int32, too, so that the result is the same to the bit.

Shape legend: N rows, I inputs, O outputs. BM, BN, BK: rows, outputs and inputs of a tile.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels_cuda import library_products
from quire_kernels_cuda.builds import Calls, NetworkShape
from quire_kernels_cuda.platform import NVIDIA, Platform, num_multiprocessors, pretended_target
from quire_kernels_cuda.targets import Target
from quire_kernels_cuda.triton.matmul import MatmulTile, choose_splits
from quire_kernels_cuda.triton.rounding import round_rows
from quire_ops import CACHE_TORCH_DTYPES, ActivationScheme, QuantizedTokens, implements, ops

__all__ = [
    "add_w8a8_splits_kernel",
    "byte_splits",
    "byte_tile",
    "calls",
    "many_rows_tile",
    "w8a8_kernel",
    "w8a8_linear",
]

_FEW_ROWS = 32
_SUM_BYTES = 64 << 20
"""Of sums in int32 that a library writes before they are scaled: at most so many, or those of `MANY_ROWS` rows."""
_LAUNCH_PIECES = 11
"""That a program reads in the 2.5 us of one launch more, three of them under way in the 0.7 us that memory takes."""


@triton.jit(do_not_specialize=["num_rows"])
def w8a8_kernel(
    tokens, steps, weight, scale, bias, out, num_rows, num_outputs, inputs, split_inputs,
    IS_SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out [N, O] = (tokens @ weight.T) * steps * scale + bias. Grid: (tiles of rows, tiles of outputs, splits).

    IS_SPLIT: out [NUM_SPLITS, N, O] int32 gets the sums over `split_inputs` inputs each, and nothing else.
    """
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    col = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    inside_row, inside_col = row < num_rows, col < num_outputs
    total = tl.zeros([BM, BN], tl.int32)
    first = tl.program_id(2) * split_inputs
    for begin in range(first, tl.minimum(first + split_inputs, inputs), BK):
        lane = begin + tl.arange(0, BK)
        inside = (lane < inputs)[None, :]
        left = tl.load(tokens + row[:, None] * inputs + lane[None, :], mask=inside_row[:, None] & inside, other=0)
        right = tl.load(weight + col[:, None] * inputs + lane[None, :], mask=inside_col[:, None] & inside, other=0)
        total = tl.dot(left, tl.trans(right), total, out_dtype=tl.int32)
    place = row[:, None] * num_outputs + col[None, :]
    inside_out = inside_row[:, None] & inside_col[None, :]
    if IS_SPLIT:
        tl.store(out + tl.program_id(2).to(tl.int64) * num_rows * num_outputs + place, total, mask=inside_out)
    else:
        result = total.to(tl.float32) * tl.load(steps + row, mask=inside_row, other=0.0)[:, None]
        result = result * tl.load(scale + col, mask=inside_col, other=0.0).to(tl.float32)[None, :]
        if HAS_BIAS:
            result = result + tl.load(bias + col, mask=inside_col, other=0.0).to(tl.float32)[None, :]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=inside_out)


@triton.jit(do_not_specialize=["num_elements"])
def add_w8a8_splits_kernel(
    parts, steps, scale, bias, out, num_elements, num_outputs,
    NUM_SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [N, O] = (sum of parts [NUM_SPLITS, N, O] int32) * steps * scale + bias."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < num_elements
    total = tl.zeros([BLOCK], tl.int32)
    for split in tl.static_range(NUM_SPLITS):
        total += tl.load(parts + split * num_elements + place, mask=mask, other=0)
    result = total.to(tl.float32) * tl.load(steps + place // num_outputs, mask=mask, other=0.0)
    result = result * tl.load(scale + place % num_outputs, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        result = result + tl.load(bias + place % num_outputs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)


def byte_tile(num_rows: int, target: Target) -> dict[str, int]:
    """Tiles of products of bytes. Few rows: narrow pieces of the weight, so that many programs read it; many: wide
    ones, which read less often."""
    stages = 3 if target.vendor == "cuda" else 1
    if num_rows <= _FEW_ROWS:
        return {"BM": 16 if num_rows <= 16 else 32, "BN": 32, "BK": 128, "num_warps": 4, "num_stages": stages}
    if target.has_few_registers:
        return {"BM": 32, "BN": 64, "BK": 64, "num_warps": 8, "num_stages": 1}
    # Up to 64 rows, 128 outputs take more registers than eight warps have there, whose sums are in tensor memory.
    narrow = num_rows <= 64 and target.arch in (100, 103)
    return {"BM": 64, "BN": 64 if narrow else 128, "BK": 128, "num_warps": 8, "num_stages": stages}


def byte_splits(num_rows: int, num_outputs: int, inputs: int, tile: dict[str, int], device: torch.device) -> int:
    """Inputs of each program of a product of bytes, a multiple of 128: all of them, unless `choose_splits` divides
    them."""
    if num_rows > tile["BM"]:
        return inputs
    cut = MatmulTile(tile["BM"], tile["BN"], tile["BK"], 1, tile["num_warps"], tile["num_stages"])
    splits = choose_splits(cut, num_outputs, inputs, num_multiprocessors(device), 1.0, launch_pieces=_LAUNCH_PIECES)
    return inputs if splits == 1 else triton.cdiv(triton.cdiv(inputs, splits), 128) * 128


def many_rows_tile(
    form: str,
    num_rows: int,
    num_outputs: int,
    inputs: int,
    device: torch.device,
    dtype: torch.dtype,
    platform: Platform,
) -> dict[str, int] | None:
    """Tiles of a product of bytes; None where a library is to compute it, as it is where that takes the sizes, unless
    ours was measured to be faster.

    Args:
        form: A name of `library_products.FORMS`.
        dtype: Of the network.
    """
    if library_products.takes(form, num_rows, num_outputs, inputs):
        sizes = {"rows": triton.next_power_of_2(num_rows), "outputs": num_outputs, "inputs": inputs}
        config = platform.config("byte_matmul", device, None, sizes=sizes, form=form, dtype=dtype)
        if config is not None:
            return {**config.blocks, "num_warps": config.num_warps, "num_stages": config.num_stages}
        if library_products.is_served(form, device, platform):
            return None
    return byte_tile(num_rows, platform.target_of(device))


def _by_library(tokens: Tensor, steps: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor) -> bool:
    """The product by torch's library, some rows at a time, so that their sums in int32 take no more than
    `_SUM_BYTES`; False where it refused."""
    num_rows, num_outputs = out.shape
    most = max(library_products.MANY_ROWS, _SUM_BYTES // (4 * num_outputs))
    num_pieces = triton.cdiv(num_rows, most)
    step = num_rows // num_pieces // 16 * 16  # the last has what is left; rows begin at multiples of 16 bytes
    sums = torch.empty((num_rows - (num_pieces - 1) * step, num_outputs), dtype=torch.int32, device=out.device)
    for piece in range(num_pieces):
        rows = slice(piece * step, num_rows if piece == num_pieces - 1 else (piece + 1) * step)
        part, done = tokens[rows], out[rows]
        if not library_products.int8_sums(part, weight, sums[: len(part)]):
            return False
        _add_parts(sums, steps[rows], scale, bias, done, num_splits=1)
    return True


def _add_parts(
    parts: Tensor, steps: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor, *, num_splits: int
) -> None:
    add_w8a8_splits_kernel[(triton.cdiv(out.numel(), 1024),)](
        parts, steps, scale, out if bias is None else bias, out, out.numel(), out.shape[1],
        NUM_SPLITS=num_splits, HAS_BIAS=bias is not None, BLOCK=1024, num_warps=4,
    )  # fmt: skip


@implements(ops.w8a8_linear)
def w8a8_linear(
    x: Tensor | QuantizedTokens,
    weight: Tensor,
    scale: Tensor,
    input_scale: Tensor,
    bias: Tensor | None,
    *,
    wide: bool = False,
    platform: Platform = NVIDIA,
) -> Tensor:
    tokens, steps, dtype = (
        x if isinstance(x, QuantizedTokens) else round_rows(x, ActivationScheme(torch.int8, input_scale))
    )
    weight = weight.contiguous()
    (num_rows, inputs), num_outputs = tokens.shape, weight.shape[0]
    out = torch.empty((num_rows, num_outputs), dtype=torch.float32 if wide else dtype, device=tokens.device)
    if not out.numel():
        return out
    tile = many_rows_tile("int8", num_rows, num_outputs, inputs, tokens.device, dtype, platform)
    if tile is None:
        if _by_library(tokens, steps, weight, scale, bias, out):
            return out
        tile = byte_tile(num_rows, platform.target_of(tokens.device))
    split_inputs = byte_splits(num_rows, num_outputs, inputs, tile, tokens.device)
    splits, parts = triton.cdiv(inputs, split_inputs), out
    if splits > 1:
        parts = torch.empty((splits, num_rows, num_outputs), dtype=torch.int32, device=tokens.device)
    elif pretended_target() is not None and library_products.takes("int8", num_rows, num_outputs, inputs):
        _add_parts(
            torch.empty_like(out, dtype=torch.int32), steps, scale, bias, out, num_splits=1
        )  # on a GPU it may be a library that computes it
    given = out if bias is None else bias
    w8a8_kernel[(triton.cdiv(num_rows, tile["BM"]), triton.cdiv(num_outputs, tile["BN"]), splits)](
        tokens, steps, weight, scale, given, parts, num_rows, num_outputs, inputs, split_inputs,
        IS_SPLIT=splits > 1, HAS_BIAS=bias is not None and splits == 1, **tile,
    )  # fmt: skip
    if splits > 1:
        _add_parts(parts, steps, scale, bias, out, num_splits=splits)
    return out


def calls(shape: NetworkShape, platform: Platform) -> Calls:
    """Few rows, with splits and without, and many."""
    if shape.weights != "int8" or shape.num_experts:
        return
    dtype = CACHE_TORCH_DTYPES[shape.dtype]
    size = shape.hidden_size
    split = (("few rows split", 16, size // 4), ("64 rows split", 64, size // 4))
    for use, rows, outputs in (("few rows", 16, 65536), *split, ("many rows", 512, size)):
        x = torch.empty(rows, size, dtype=dtype, device="meta")
        weight = torch.empty(outputs, size, dtype=torch.int8, device="meta")
        scale = torch.empty(outputs, dtype=dtype, device="meta")
        step = torch.empty(1, dtype=torch.float32, device="meta")
        yield f"{shape.dtype} {use}", partial(w8a8_linear, x, weight, scale, step, None, platform=platform)
