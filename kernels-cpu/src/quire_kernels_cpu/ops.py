"""The kernels as backends of ops. A call crosses the C interface with raw pointers and sizes; nothing is copied.

Shapes and dtypes are those of `quire_ops.declarations`. The result of a row depends neither on how many rows there are
nor on its place among them.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from quire_kernels_cpu.builds import library, unavailable
from quire_kernels_cpu.decode_step import decode_step
from quire_kernels_cpu.decoder import MAX_HEAD_DIM, MAX_QUERIES_PER_KV_HEAD, cache_format, decoder_stack, path_pointer
from quire_kernels_cpu.drawing import draw, draw_masked
from quire_kernels_cpu.dtypes import DTYPES
from quire_kernels_cpu.latent import head_linear, index_topk, latent_attention, sparse_latent_attention
from quire_kernels_cpu.lora import lora_linear
from quire_kernels_cpu.matrix import Matrix
from quire_kernels_cpu.moe import fused_moe
from quire_kernels_cpu.recurrent import (
    SIZES,
    causal_conv1d,
    gated_delta_rule,
    mamba2_scan,
    selective_scan,
    wkv,
)
from quire_kernels_cpu.rope_and_cache import rope_and_write_kv
from quire_kernels_cpu.routing import route_experts
from quire_kernels_cpu.step_inputs import step_inputs
from quire_ops import EXPERT_ACTIVATIONS, OpBackend, SizeRule
from quire_ops.declarations import PagedLayout
from quire_ops.torch_attention import paged_attention as torch_paged_attention
from quire_ops.torch_ops import write_kv_cache as torch_write_kv_cache

__all__ = [
    "activation",
    "add_rms_norm",
    "backends",
    "gelu_and_mul",
    "grouped_linear",
    "head_linear",
    "index_topk",
    "int8_linear",
    "latent_attention",
    "linear",
    "lm_head",
    "lm_head_argmax",
    "lora_linear",
    "paged_attention",
    "rms_norm",
    "rope_and_write_kv",
    "route_experts",
    "sigmoid_and_mul",
    "silu_and_mul",
    "sparse_latent_attention",
    "w8a8_linear",
    "write_kv_cache",
]

_ATTENTION_SIZES = {
    "head_dim": SizeRule(maximum=MAX_HEAD_DIM),
    "queries_per_kv_head": SizeRule(maximum=MAX_QUERIES_PER_KV_HEAD),
}


_ACTIVATIONS = {name: i for i, name in enumerate((*EXPERT_ACTIVATIONS, "sigmoid", "tanh", "gelu_erf", "expm1"))}
"""Name -> number in `csrc/elementwise.h`."""
_QUANTIZED_CACHES = frozenset({"fp8_e4m3", "fp8_e5m2", "int8", "int4"})


def backends() -> list[OpBackend]:
    """The entry point of group `quire.ops`."""
    functions = (
        linear,
        lm_head,
        lm_head_argmax,
        step_inputs,
        int8_linear,
        w8a8_linear,
        grouped_linear,
        lora_linear,
        rms_norm,
        add_rms_norm,
        activation,
        silu_and_mul,
        gelu_and_mul,
        sigmoid_and_mul,
        write_kv_cache,
        rope_and_write_kv,
        paged_attention,
        head_linear,
        latent_attention,
        index_topk,
        sparse_latent_attention,
        decoder_stack,
        decode_step,
        draw,
        draw_masked,
        route_experts,
        fused_moe,
        causal_conv1d,
        mamba2_scan,
        selective_scan,
        gated_delta_rule,
        wkv,
    )
    return [
        OpBackend(
            op=function.__name__,
            name="cpu",
            function=function,
            priority=10,
            devices=frozenset({"cpu"}),
            dtypes=frozenset(DTYPES),
            sizes=_ATTENTION_SIZES if function in (paged_attention, decoder_stack, decode_step) else SIZES,
            cache_dtypes=_QUANTIZED_CACHES if function in (paged_attention, decoder_stack, decode_step) else None,
            batch_invariant=True,
            trees=function in (paged_attention, latent_attention, decoder_stack),
            unavailable=unavailable(),
        )
        for function in functions
    ]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Op `linear`."""
    return _linear(x, weight, bias)


def lm_head(x: Tensor, weight: Tensor) -> Tensor:
    """Op `lm_head`."""
    return _linear(x, weight, wide=True)


def lm_head_argmax(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Op `lm_head_argmax`: the logits are those of `lm_head` to the bit, and never in memory."""
    x, weight = x.contiguous(), weight.contiguous()
    num_tokens, cols = x.shape
    ids = torch.empty(num_tokens, dtype=torch.int64)
    peaks = torch.empty(num_tokens, dtype=torch.float32)
    if num_tokens:
        library().quire_linear_largest(
            DTYPES[x.dtype],
            x.data_ptr(),
            weight.data_ptr(),
            ids.data_ptr(),
            peaks.data_ptr(),
            num_tokens,
            cols,
            weight.shape[0],
        )
    return ids, peaks


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, *, wide: bool = False) -> Tensor:
    """Op `int8_linear`. Tokens in bfloat16 become fixed-point numbers of 15 bits, see `csrc/activations.h`."""
    return _linear(x, weight, bias, scale, wide=wide)


def w8a8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, input_scale: Tensor, bias: Tensor | None, *, wide: bool = False
) -> Tensor:
    """Op `w8a8_linear`: whole numbers by int8 tiles or by vectors, exact within 256 inputs at least."""
    return _linear(x, weight, bias, scale, input_scale=input_scale, wide=wide)


def grouped_linear(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, *, wide: bool = False
) -> Tensor:
    """Op `grouped_linear`; with AMX and integers, the tokens as in `int8_linear`."""
    return _linear(x, weight, bias, scale, zero, wide=wide)


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
        matrix = Matrix.of(weight, bias, scale, zero, input_scale, inputs=x.shape[1])
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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Op `rms_norm`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _rms_norm(out, x, None, weight, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Op `add_rms_norm`; the sum is written over `residual`."""
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


def activation(x: Tensor, name: str) -> Tensor:
    """Op `activation`; written over x if its numbers are next to each other."""
    x = x.contiguous()
    library().quire_activate(DTYPES[x.dtype], _ACTIVATIONS[name], x.data_ptr(), x.data_ptr(), None, x.numel())
    return x


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Op `silu_and_mul`; written over `gate`."""
    return _activate_and_mul("silu", gate, up)


def gelu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Op `gelu_and_mul`; written over `gate`."""
    return _activate_and_mul("gelu", gate, up)


def sigmoid_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Op `sigmoid_and_mul`; written over `gate` where that is as large."""
    return _activate_and_mul("sigmoid", gate.expand_as(up), up)


def _activate_and_mul(name: str, gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    to = gate.data_ptr()
    library().quire_activate(DTYPES[gate.dtype], _ACTIVATIONS[name], to, to, up.data_ptr(), gate.numel())
    return gate


def write_kv_cache(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None = None
) -> None:
    """Op `write_kv_cache`; dtypes that the kernels do not know go to torch's operators."""
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
) -> Tensor:
    """Op `paged_attention`; dtypes that the kernels do not read go to torch's operators."""
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
    )
    return out


def _as_float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
