"""The two ends of a network: rows of the embedding, and the most likely token without its logits in memory.

Shape legend: T tokens, N rows, I inputs, V vocabulary. BM, BV, BK: rows, tokens of the vocabulary and inputs of a tile.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels_cuda.builds import Calls, NetworkShape
from quire_kernels_cuda.platform import NVIDIA, Platform
from quire_kernels_cuda.triton.matmul import choose_tile, tile_sum
from quire_ops import CACHE_TORCH_DTYPES, implements, ops

__all__ = ["best_of_tiles_kernel", "best_token_kernel", "calls", "embedding", "embedding_kernel", "lm_head_argmax"]

_BLOCK = 1024
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def embedding_kernel(ids, weight, out, size, BLOCK: tl.constexpr):
    """out [T, size] = weight[ids]; a program takes a piece of a row."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token).to(tl.int64)
    tl.store(out + token * size + col, tl.load(weight + row * size + col, mask=col < size), mask=col < size)


@triton.jit
def _best(values, ids, axis: tl.constexpr):
    """The largest value and the lowest id that has it; NaN where there is one."""
    has_nan = tl.max((values != values).to(tl.int32), axis=axis) > 0
    max_logit = tl.max(tl.where(values == values, values, float("-inf")), axis=axis)
    winner = tl.min(tl.where(values == tl.expand_dims(max_logit, axis), ids, _NO_TOKEN), axis=axis)
    return tl.where(has_nan, float("nan"), max_logit), winner


@triton.jit(do_not_specialize=["num_rows"])
def best_token_kernel(
    x, weight, max_logits, winners, num_rows, vocab_size, inputs, x_row, num_tiles,
    BM: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """max_logits, winners [N, num_tiles]: the best logit of a tile of BV tokens, and its token."""
    tile = tl.program_id(0)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    tokens = tile * BV + tl.arange(0, BV)
    inside_row, inside_out = row < num_rows, tokens < vocab_size
    logits = tile_sum(
        x, row.to(tl.int64) * x_row, inside_row, weight, x, x, tokens.to(tl.int64), inside_out, vocab_size, inputs,
        0, inputs, 1, inputs, "plain", 0, False, BM, BV, BK,
    )  # fmt: skip
    logits = tl.where(inside_out[None, :], logits, float("-inf"))
    max_logit, winner = _best(logits, tl.broadcast_to(tokens[None, :], (BM, BV)), 1)
    place = row.to(tl.int64) * num_tiles + tile
    tl.store(max_logits + place, max_logit, mask=inside_row)
    tl.store(winners + place, winner, mask=inside_row)


@triton.jit
def best_of_tiles_kernel(max_logits, winners, best, ids, num_tiles, vocab_size, BLOCK: tl.constexpr):
    """best [N], ids [N]: the best of a row's tiles."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    value = tl.load(max_logits + row * num_tiles + lane, mask=lane < num_tiles, other=float("-inf"))
    token = tl.load(winners + row * num_tiles + lane, mask=lane < num_tiles, other=_NO_TOKEN)
    max_logit, winner = _best(value, token, 0)
    tl.store(best + row, max_logit)
    tl.store(ids + row, tl.minimum(winner, vocab_size - 1).to(tl.int64))


@implements(ops.embedding)
def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    weight = weight.contiguous()
    size = weight.shape[1]
    out = torch.empty((ids.shape[0], size), dtype=weight.dtype, device=weight.device)
    if out.numel():
        embedding_kernel[(ids.shape[0], triton.cdiv(size, _BLOCK))](ids, weight, out, size, BLOCK=_BLOCK, num_warps=4)
    return out


@implements(ops.lm_head_argmax)
def lm_head_argmax(x: Tensor, weight: Tensor, *, platform: Platform = NVIDIA) -> tuple[Tensor, Tensor]:
    """Each tile of the vocabulary keeps its best token, then the best of those is taken."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    num_rows, inputs = x.shape
    vocab_size = weight.shape[0]
    ids = torch.empty(num_rows, dtype=torch.int64, device=x.device)
    best = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        target = platform.target_of(x.device)
        # Tiles over the vocabulary fill any GPU: none needs splits.
        tile = choose_tile(num_rows, vocab_size, inputs, 0, target)
        rows, tokens = tile.rows, 64 if tile.rows <= 32 else tile.outputs
        num_tiles = triton.cdiv(vocab_size, tokens)
        max_logits = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=x.device)
        winners = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=x.device)
        best_token_kernel[(num_tiles, triton.cdiv(num_rows, rows))](
            x, weight.contiguous(), max_logits, winners, num_rows, vocab_size, inputs, x.stride(0), num_tiles,
            BM=rows, BV=tokens, BK=tile.inputs * 2 // x.element_size(), num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )  # fmt: skip
        best_of_tiles_kernel[(num_rows,)](
            max_logits, winners, best, ids, num_tiles, vocab_size, BLOCK=triton.next_power_of_2(num_tiles), num_warps=4
        )
    return ids, best


def calls(shape: NetworkShape, platform: Platform) -> Calls:
    """An embedding, and the most likely tokens of few and of many rows."""
    dtype = CACHE_TORCH_DTYPES[shape.dtype]
    weight = torch.empty(shape.vocab_size, shape.hidden_size, dtype=dtype, device="meta")
    ids = torch.empty(16, dtype=torch.int64, device="meta")
    label = f"{shape.dtype} {shape.hidden_size}"
    yield label, lambda: embedding(ids, weight)
    for use, rows in (("few rows", 16), ("many rows", 256)):
        x = torch.empty(rows, shape.hidden_size, dtype=dtype, device="meta")
        yield f"{use} {label} v{shape.vocab_size}", partial(lm_head_argmax, x, weight, platform=platform)
