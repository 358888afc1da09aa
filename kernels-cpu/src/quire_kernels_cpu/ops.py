"""The kernels as backends of ops. A call crosses the C interface with raw pointers and sizes; nothing is copied."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from quire_kernels_cpu import (
    decode_step,
    decoder,
    encoder,
    latent,
    lora,
    maxsim,
    moe,
    recurrent,
    rope_and_cache,
    routing,
    sampling,
    step_inputs,
)
from quire_kernels_cpu.backend import ATTENTION_FACTS, backend_for
from quire_kernels_cpu.builds import library, unavailable
from quire_kernels_cpu.decoder import cache_format, path_pointer
from quire_kernels_cpu.dtypes import DTYPES
from quire_kernels_cpu.layer_arguments import ACTIVATIONS
from quire_kernels_cpu.matrix import matrix_argument
from quire_ops import LinearWeights, OpBackend, PagedLayout, QuantizedTokens, ops
from quire_ops.kv_cache_ops import torch_write_kv_cache
from quire_ops.quantized_linear import torch_w8a8_linear
from quire_ops.torch_attention import paged_attention as torch_paged_attention

__all__ = ["backends"]

MODULES = (
    decode_step,
    decoder,
    encoder,
    latent,
    lora,
    maxsim,
    moe,
    recurrent,
    rope_and_cache,
    routing,
    sampling,
    step_inputs,
)
"""The other modules with backends: importing them adds theirs."""


def backends() -> list[OpBackend[..., Any]]:
    """The entry point of group `quire.ops`."""
    return backend_for.records(unavailable=unavailable())


@backend_for(ops.linear)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _linear(x, weight, bias)


@backend_for(ops.lm_head)
def lm_head(x: Tensor, weight: Tensor) -> Tensor:
    return _linear(x, weight, wide=True)


@backend_for(ops.lm_head_argmax)
def lm_head_argmax(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The logits are those of `lm_head` to the bit, and never in memory."""
    x, weight = x.contiguous(), weight.contiguous()
    num_tokens, cols = x.shape
    ids = torch.empty(num_tokens, dtype=torch.int64)
    max_logits = torch.empty(num_tokens, dtype=torch.float32)
    if num_tokens:
        library().quire_linear_argmax(
            DTYPES[x.dtype],
            x.data_ptr(),
            weight.data_ptr(),
            ids.data_ptr(),
            max_logits.data_ptr(),
            num_tokens,
            cols,
            weight.shape[0],
        )
    return ids, max_logits


@backend_for(ops.int8_linear)
def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, *, wide: bool = False) -> Tensor:
    """Tokens in bfloat16 become fixed-point numbers of 15 bits, see `csrc/activations.h`."""
    return _linear(x, weight, bias, scale, wide=wide)


@backend_for(ops.w8a8_linear)
def w8a8_linear(
    x: Tensor | QuantizedTokens,
    weight: Tensor,
    scale: Tensor,
    input_scale: Tensor,
    bias: Tensor | None,
    *,
    wide: bool = False,
) -> Tensor:
    """Integers by int8 tiles or by vectors, exact within 256 inputs at least; quantized tokens by torch's operators."""
    if isinstance(x, QuantizedTokens):
        return torch_w8a8_linear(x, weight, scale, input_scale, bias, wide=wide)
    return _linear(x, weight, bias, scale, input_scale=input_scale, wide=wide)


@backend_for(ops.grouped_linear)
def grouped_linear(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, *, wide: bool = False
) -> Tensor:
    """With AMX and integers, the tokens as in `int8_linear`."""
    return _linear(x, weight, bias, scale, zero, wide=wide)


@backend_for(ops.block_linear)
def block_linear(x: Tensor, weight: Tensor, header: Tensor, bias: Tensor | None, *, wide: bool = False) -> Tensor:
    """The bits of op `linear` with the decoded weight."""
    return _linear(x, weight, bias, header, wide=wide)


@backend_for(ops.quantized_embedding)
def quantized_embedding(ids: Tensor, weights: LinearWeights, size: int, dtype: torch.dtype) -> Tensor:
    ids, out, rows = ids.contiguous(), torch.empty(len(ids), size, dtype=dtype), len(weights.weight)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        raise IndexError(f"ids of rows must be from 0 to {rows - 1}, are from {int(ids.min())} to {int(ids.max())}")
    table = matrix_argument(*weights[:5], inputs=size)
    where = ids.data_ptr(), len(ids), rows, size
    library().quire_read_rows(DTYPES[dtype], ctypes.addressof(table), *where, out.data_ptr())
    return out


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    *,
    input_scale: Tensor | None = None,
    wide: bool = False,
) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    scale = None if scale is None else scale.contiguous()
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32 if wide else x.dtype)
    if out.numel():
        matrix = matrix_argument(weight, bias, scale, zero, input_scale, inputs=x.shape[1])
        library().quire_linear(
            DTYPES[x.dtype],
            x.data_ptr(),
            ctypes.addressof(matrix),
            out.data_ptr(),
            x.shape[0],
            x.shape[1],
            weight.shape[0],
            out.dtype == torch.float32,
        )
    return out


@backend_for(ops.rms_norm)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    _rms_norm(out, x, None, weight, eps)
    return out


@backend_for(ops.add_rms_norm)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum is written over `residual`."""
    residual = residual.contiguous()
    out = torch.empty_like(residual)
    _rms_norm(out, residual, x.contiguous(), weight, eps)
    return out, residual


def _rms_norm(out: Tensor, x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> None:
    size = weight.shape[0]
    library().quire_rms_norm(
        DTYPES[x.dtype],
        out.data_ptr(),
        x.data_ptr(),
        None if added is None else added.data_ptr(),
        weight.data_ptr(),
        x.numel() // size,
        size,
        eps,
    )


@backend_for(ops.layer_norm)
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    x, weight, bias = x.contiguous(), _as_float(weight), _as_float(bias)
    out, size = torch.empty_like(x), x.shape[-1]
    library().quire_layer_norm(
        DTYPES[x.dtype],
        out.data_ptr(),
        x.data_ptr(),
        _pointer(weight),
        _pointer(bias),
        x.numel() // size,
        size,
        eps,
    )
    return out


@backend_for(ops.activation)
def activation(x: Tensor, name: str) -> Tensor:
    """Written over x if its numbers are next to each other."""
    x = x.contiguous()
    library().quire_activate(DTYPES[x.dtype], ACTIVATIONS.index(name), x.data_ptr(), x.data_ptr(), None, x.numel())
    return x


@backend_for(ops.silu_and_mul)
def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Written over `gate`."""
    return _activate_and_mul("silu", gate, up)


@backend_for(ops.gelu_and_mul)
def gelu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Written over `gate`."""
    return _activate_and_mul("gelu", gate, up)


@backend_for(ops.sigmoid_and_mul)
def sigmoid_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Written over `gate` where that is as large."""
    return _activate_and_mul("sigmoid", gate.expand_as(up), up)


def _activate_and_mul(name: str, gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    to = gate.data_ptr()
    library().quire_activate(DTYPES[gate.dtype], ACTIVATIONS.index(name), to, to, up.data_ptr(), gate.numel())
    return gate


@backend_for(ops.write_kv_cache)
def write_kv_cache(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None = None
) -> None:
    """Dtypes that the kernels do not know go to torch's operators."""
    number = cache_format(kv_cache, key.dtype)
    if key.dtype not in DTYPES or number is None or not kv_cache[0].is_contiguous():
        torch_write_kv_cache(key, value, kv_cache, slot_mapping, kv_scale)
        return
    key, value, slots, scales = key.contiguous(), value.contiguous(), slot_mapping.contiguous(), _as_float(kv_scale)
    library().quire_write_kv_cache(
        DTYPES[key.dtype],
        key.data_ptr(),
        value.data_ptr(),
        kv_cache.data_ptr(),
        number,
        _pointer(scales),
        slots.data_ptr(),
        len(slots),
        kv_cache.shape[2],
        key.shape[2],
        kv_cache.shape[3],
        kv_cache.stride(0) * kv_cache.element_size(),
    )


@backend_for(ops.paged_attention, **ATTENTION_FACTS, trees=True)
def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    layout: PagedLayout,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    kv_scale: Tensor | None = None,
    int8_products: bool = False,
) -> Tensor:
    """Dtypes that the kernels do not read go to torch's operators. Products are in int8 for bfloat16 with VNNI and
    without AMX, where D is a multiple of 32."""
    number = cache_format(kv_cache, query.dtype)
    if query.dtype not in DTYPES or number is None or not kv_cache[0].is_contiguous():
        return torch_paged_attention(
            query,
            kv_cache,
            layout,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
            kv_scale=kv_scale,
            alibi_slopes=alibi_slopes,
        )
    query = query.contiguous()
    sinks, slopes, scales = (_as_float(each) for each in (sinks, alibi_slopes, kv_scale))
    out = torch.empty_like(query)
    library().quire_attention(
        DTYPES[query.dtype],
        query.data_ptr(),
        kv_cache.data_ptr(),
        number,
        _pointer(scales),
        out.data_ptr(),
        layout.block_table.data_ptr(),
        layout.block_table.stride(0),
        layout.query_start_loc.data_ptr(),
        layout.seq_lens.data_ptr(),
        len(layout.query_lens),
        query.shape[1],
        kv_cache.shape[2],
        query.shape[2],
        kv_cache.shape[3],
        kv_cache.stride(0) * kv_cache.element_size(),
        scale,
        sliding_window or 0,
        soft_cap or 0.0,
        _pointer(sinks),
        _pointer(slopes),
        *path_pointer(layout),
        int8_products,
    )
    return out


def _as_float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
