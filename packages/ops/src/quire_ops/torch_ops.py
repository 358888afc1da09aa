"""The torch backend: each op through torch's own fused operators. Shapes and dtypes are in `declarations.py`.

Paged attention has its own module, `torch_attention.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_ops.grouped import dequantize
from quire_ops.int8_tokens import round_tokens
from quire_ops.kv_format import encode_rows

__all__ = [
    "activation",
    "add_rms_norm",
    "embedding",
    "gelu_and_mul",
    "grouped_linear",
    "int8_linear",
    "layer_norm",
    "linear",
    "lm_head",
    "lm_head_argmax",
    "rms_norm",
    "rotary_embedding",
    "sigmoid_and_mul",
    "silu_and_mul",
    "w8a8_linear",
    "write_kv_cache",
]

INT8PACK_ROWS = 16
"""Rows up to which torch's int8 product wins over widening the weight, in bfloat16."""
PIECE_ELEMENTS = 1 << 19
"""Elements of a weight that are widened at a time."""


def _gelu_erf(x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return F.gelu(x)
    # With AVX-512, torch 2.15 asks oneDNN, which errs by 1e-4 of small results, and finds no number at infinity.
    wide = x.float()
    return (wide * (1.0 + torch.erf(wide * math.sqrt(0.5))).mul_(0.5)).to(x.dtype)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": partial(F.gelu, approximate="tanh"),
    "gelu_erf": _gelu_erf,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "expm1": torch.expm1,
}

_int8pack_mm: Any = getattr(torch, "_weight_int8pack_mm", None)

linear = F.linear
embedding = F.embedding


def lm_head(x: Tensor, weight: Tensor) -> Tensor:
    """Op `lm_head`."""
    return F.linear(x, weight).float()


def lm_head_argmax(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Op `lm_head_argmax`."""
    peaks, ids = lm_head(x, weight).max(dim=-1)
    return ids, peaks


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, *, wide: bool = False) -> Tensor:
    """Op `int8_linear`: torch's own int8 product for few bfloat16 rows, else the weight widened piece by piece.

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


def w8a8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, input_scale: Tensor, bias: Tensor | None, *, wide: bool = False
) -> Tensor:
    """Op `w8a8_linear`: torch's product of int8, or where it serves no such device, whole numbers in float64."""
    tokens, step = round_tokens(x, input_scale)
    if x.device.type == "cpu":
        total = torch._int_mm(tokens, weight.T).float()
    else:
        total = (tokens.double() @ weight.double().T).float()
    out = total.mul_(step[:, None]).mul_(scale.float())
    if bias is not None:
        out += bias.float()
    return out if wide else out.to(x.dtype)


def grouped_linear(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, *, wide: bool = False
) -> Tensor:
    """Op `grouped_linear`: the weight widened to float32, then to the dtype of x, piece by piece."""
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


def _int8pack_serves(weight: Tensor) -> bool:
    """torch's int8 product reads past the end of weights whose sides are not multiples of its tiles."""
    return (
        _int8pack_mm is not None
        and weight.device.type == "cpu"
        and weight.shape[0] % 16 == 0
        and weight.shape[1] % 32 == 0
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Op `rms_norm`."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Op `add_rms_norm`; the sum is written over `residual`."""
    residual += x
    return F.rms_norm(residual, weight.shape, weight, eps), residual


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Op `layer_norm`."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Op `rotary_embedding`: with the signs already in `sin`, the rotation is one roll by half a head. Products and sum
    are rounded one by one: torch's `addcmul` rounds once or twice, as the number of tokens has it."""
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1) * sin)


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Op `silu_and_mul`; written over `gate`."""
    return F.silu(gate, inplace=True).mul_(up)


def gelu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Op `gelu_and_mul`."""
    return F.gelu(gate, approximate="tanh").mul_(up)


def sigmoid_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Op `sigmoid_and_mul`; written over `gate` where that is as large."""
    gate = gate.sigmoid_()
    return gate.mul_(up) if gate.shape == up.shape else gate * up


def activation(x: Tensor, name: str) -> Tensor:
    """Op `activation`."""
    return _ACTIVATIONS[name](x)


def write_kv_cache(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None = None
) -> None:
    """Op `write_kv_cache`: one scatter."""
    block_size = kv_cache.shape[3]
    scale = None if kv_scale is None else kv_scale[..., None]
    pairs = encode_rows(torch.stack((key, value), dim=1), kv_cache.dtype, scale)  # [T, 2, Hkv, X]
    kv_cache[slot_mapping // block_size, :, :, slot_mapping % block_size] = pairs
