"""Products with quantized weights. All of them take `wide`: the result in float32 instead of the dtype of x.

Shape legend: N rows, I inputs, O outputs, G groups of inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_ops.activation_quant import FP8_GROUP, ActivationScheme, QuantizedTokens, quantize_tokens
from quire_ops.block_formats import decode_blocks
from quire_ops.grouped import dequantize
from quire_ops.linear_ops import linear
from quire_ops.op import op
from quire_ops.table import torch_backend_for

__all__ = [
    "block_linear",
    "fp8_linear",
    "grouped_linear",
    "int8_linear",
    "torch_grouped_linear",
    "torch_int8_linear",
    "torch_w8a8_linear",
    "w8a8_linear",
]

INT8PACK_ROWS = 16
"""Rows up to which torch's int8 product wins over widening the weight, in bfloat16."""
PIECE_ELEMENTS = 1 << 19
"""Elements of a weight that are widened at a time."""

_int8pack_mm: Any = getattr(torch, "_weight_int8pack_mm", None)


@op
def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, *, wide: bool = False) -> Tensor:
    """x @ (weight * scale[:, None]).T + bias: weight-only, symmetric, one scale per output; x [N, I],
    weight [O, I] int8, scale and bias [O] of x's dtype -> [N, O]."""
    return _with_wide_weight(x, weight.double() * scale.double()[:, None], bias, wide=wide)


@op
def w8a8_linear(
    x: Tensor | QuantizedTokens,
    weight: Tensor,
    scale: Tensor,
    input_scale: Tensor,
    bias: Tensor | None,
    *,
    wide: bool = False,
) -> Tensor:
    """q @ weight.T * s[:, None] * scale + bias with q and s of `quantize_int8`: both sides in int8, their product an
    integer. A row that is not finite becomes NaN. x may be quantized already where the backend has an op that does it.

    x [N, I], weight [O, I] int8, scale [O] of x's dtype, input_scale [1] float32, bias [O] -> [N, O]."""
    tokens, scales, dtype = quantize_tokens(x, ActivationScheme(torch.int8, input_scale))
    out = (tokens.long() @ weight.long().T).double() * scales.double()[:, None] * scale.double()
    out = out if bias is None else out + bias.double()
    return out.to(torch.float32 if wide else dtype)


@op
def fp8_linear(
    x: Tensor | QuantizedTokens,
    weight: Tensor,
    scale: Tensor,
    input_scale: Tensor,
    bias: Tensor | None,
    *,
    wide: bool = False,
) -> Tensor:
    """(q * s) @ (weight * scale).T + bias with q and s of `quantize_fp8`: both sides in fp8 e4m3, summed in float32. A
    row that is not finite becomes NaN. x may be quantized already. Optional: where no backend has it, inputs stay as
    they are.

    x [N, I], weight [O, I] float8_e4m3fn, scale [O, G] float32, input_scale [1] float32, bias [O] -> [N, O]. G is 1,
    then a token has one scale; or ceil(I / 128), then scales of tokens and weights are those of 128 inputs each."""
    scheme = ActivationScheme(torch.float8_e4m3fn, input_scale, by_group=scale.shape[1] > 1)
    tokens, scales, dtype = quantize_tokens(x, scheme)
    inputs = tokens.shape[1]
    size = inputs if scale.shape[1] == 1 else FP8_GROUP
    rows, columns = (
        part.double() * of_group.double().repeat_interleave(size, dim=1)[:, :inputs]
        for part, of_group in ((tokens, scales), (weight, scale))
    )
    out = rows @ columns.T
    out = out if bias is None else out + bias.double()
    return out.to(torch.float32 if wide else dtype)


@op
def grouped_linear(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, *, wide: bool = False
) -> Tensor:
    """x @ (scale * (weight - zero)).T + bias: weight-only int4, int8 or fp8 with a scale for each group of 32, 64 or
    128 inputs of each output (`grouped.py` says how they are packed).

    x [N, I], weight [O, 64 * ceil(I / 128)] uint8, [O, I] int8 or [O, I] float8_e4m3fn, scale [ceil(O / 16), G, 16] of
    x's dtype or float32, zero like scale, int16, bias [O] -> [N, O]."""
    return _with_wide_weight(x, dequantize(weight, scale, zero, x.shape[1], torch.float64), bias, wide=wide)


@op
def block_linear(x: Tensor, weight: Tensor, header: Tensor, bias: Tensor | None, *, wide: bool = False) -> Tensor:
    """x @ W.T + bias, W decoded from blocks. A backend rounds W to the dtype of x, as this does, or takes it as it is;
    `block_formats.py` says how blocks are packed. Optional: where no backend has it, weights are decoded once.

    x [N, I], weight [O, bytes of a row] uint8, in blocks or in planes (`OpBackend.planes`), header [17] float32 or
    longer, bias [O] -> [N, O]."""
    return _with_wide_weight(x, decode_blocks(weight, header).to(x.dtype).double(), bias, wide=wide)


def _with_wide_weight(x: Tensor, weight: Tensor, bias: Tensor | None, *, wide: bool) -> Tensor:
    """The product with a weight in float64."""
    out = linear(x.double(), weight, bias)
    return out.to(torch.float32 if wide else x.dtype)


@torch_backend_for(int8_linear)
def torch_int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, *, wide: bool = False) -> Tensor:
    """torch's own int8 product for few bfloat16 rows, else the weight widened piece by piece.

    A piece is as large as stays in a processor core's cache. torch's product exists for the other dtypes too, but is
    slower there than widening, and for many rows everywhere (figures in the changelog).
    """
    if not wide and x.shape[0] <= INT8PACK_ROWS and x.dtype == torch.bfloat16 and _int8pack_serves(weight):
        out: Tensor = _int8pack_mm(x, weight, scale)
    else:
        rows = max(1, PIECE_ELEMENTS // weight.shape[1])
        out = torch.cat([F.linear(x, piece.to(x.dtype)) for piece in torch.split(weight, rows)], dim=-1)
        out = out.float() if wide else out
        out *= scale
    if bias is not None:
        out += bias
    return out


def _int8pack_serves(weight: Tensor) -> bool:
    """torch's int8 product reads past the end of weights whose sides are not multiples of its tiles."""
    return (
        _int8pack_mm is not None
        and weight.device.type == "cpu"
        and weight.shape[0] % 16 == 0
        and weight.shape[1] % 32 == 0
    )


@torch_backend_for(w8a8_linear)
def torch_w8a8_linear(
    x: Tensor | QuantizedTokens,
    weight: Tensor,
    scale: Tensor,
    input_scale: Tensor,
    bias: Tensor | None,
    *,
    wide: bool = False,
) -> Tensor:
    """torch's product of int8, or where it serves no such device, integers in float64."""
    tokens, scales, dtype = quantize_tokens(x, ActivationScheme(torch.int8, input_scale))
    if tokens.device.type == "cpu":
        total = torch._int_mm(tokens, weight.T).float()
    else:
        total = (tokens.double() @ weight.double().T).float()
    out = total.mul_(scales[:, None]).mul_(scale.float())
    if bias is not None:
        out += bias.float()
    return out if wide else out.to(dtype)


@torch_backend_for(grouped_linear)
def torch_grouped_linear(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, *, wide: bool = False
) -> Tensor:
    """The weight widened to float32, then to the dtype of x, piece by piece."""
    outputs, blocks = weight.shape[0], max(1, PIECE_ELEMENTS // x.shape[1] // 16)
    parts = []
    for begin in range(0, scale.shape[0], blocks):
        block, rows = slice(begin, begin + blocks), slice(begin * 16, min((begin + blocks) * 16, outputs))
        zeros = None if zero is None else zero[block]
        piece = dequantize(weight[rows], scale[block], zeros, x.shape[1], torch.float32)
        parts.append(F.linear(x, piece.to(x.dtype)))
    out = torch.cat(parts, dim=-1)
    out = out.float() if wide else out
    if bias is not None:
        out += bias
    return out
