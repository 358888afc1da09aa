"""The recurrent ops: short runs through the kernels of `recurrent_kernels.py`, long prompts in chunks through torch.

A kernel that goes token by token reads each state once, which is all that a decode does; a long prompt is better cut
into chunks that are matrix products. Shapes are in `quire_ops.recurrent`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from quire_kernels_cuda.builds import Calls, NetworkShape
from quire_kernels_cuda.platform import Platform
from quire_kernels_cuda.triton.attention_steps import meta_layout
from quire_kernels_cuda.triton.recurrent_kernels import (
    causal_conv1d_kernel,
    gated_delta_rule_kernel,
    mamba2_kernel,
    selective_scan_kernel,
    wkv_kernel,
)
from quire_ops import CACHE_TORCH_DTYPES, PagedLayout, implements, ops, torch_recurrent

__all__ = ["LONG_RUN", "calls", "causal_conv1d", "gated_delta_rule", "mamba2_scan", "selective_scan", "wkv"]

LONG_RUN = 64
"""Tokens of a sequence from which on chunks are taken: one chunk of torch's."""
_TILE = 4096
"""Numbers of state that a program holds."""


@implements(ops.causal_conv1d)
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, layout: PagedLayout, *, activation: str | None = None
) -> Tensor:
    if _is_long(layout):
        return torch_recurrent.causal_conv1d(x, weight, bias, state, layout, activation=activation)
    x = x if x.stride(-1) == 1 else x.contiguous()
    channels, taps = weight.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        causal_conv1d_kernel[(len(layout.query_lens), triton.cdiv(channels, 128))](
            x, weight.contiguous(), x if bias is None else bias, state, out, *_places(layout, state), channels,
            x.stride(0), K=taps, TAPS=triton.next_power_of_2(taps), HAS_BIAS=bias is not None,
            SILU=activation == "silu", BC=128, num_warps=4,
        )  # fmt: skip
    return out


@implements(ops.mamba2_scan)
def mamba2_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    layout: PagedLayout,
    *,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    if _is_long(layout):
        return torch_recurrent.mamba2_scan(x, dt, a, b, c, d, dt_bias, state, layout, dt_limit=dt_limit)
    x, dt, b, c = (_dense_rows(each) for each in (x, dt, b, c))
    num_heads, head_dim, num_numbers = state.shape[1:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        numbers = triton.next_power_of_2(num_numbers)
        piece = min(triton.next_power_of_2(head_dim), max(1, _TILE // numbers))
        mamba2_kernel[(len(layout.query_lens), num_heads, triton.cdiv(head_dim, piece))](
            x, dt, a, b, c, d, dt_bias, state, out, *_places(layout, state), num_heads, num_heads // b.shape[1],
            x.stride(0), dt.stride(0), b.stride(0), c.stride(0), *map(float, dt_limit),
            P=head_dim, N=num_numbers, NS=numbers, BP=piece, num_warps=4,
        )  # fmt: skip
    return out


@implements(ops.selective_scan)
def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    layout: PagedLayout,
) -> Tensor:
    """Torch has no chunks for it either, so every run goes token by token here."""
    x, dt, b, c = (_dense_rows(each) for each in (x, dt, b, c))
    channels, num_numbers = state.shape[1:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        numbers = triton.next_power_of_2(num_numbers)
        piece = min(triton.next_power_of_2(channels), max(1, 1024 // numbers))
        selective_scan_kernel[(len(layout.query_lens), triton.cdiv(channels, piece))](
            x, dt, a.contiguous(), b, c, d, dt_bias, state, out, *_places(layout, state), channels,
            x.stride(0), dt.stride(0), b.stride(0), c.stride(0), N=num_numbers, NS=numbers, BC=piece, num_warps=4,
        )  # fmt: skip
    return out


@implements(ops.gated_delta_rule)
def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    layout: PagedLayout,
) -> Tensor:
    if _is_long(layout):
        return torch_recurrent.gated_delta_rule(query, key, value, a, b, a_log, dt_bias, state, layout)
    query, key, value, a, b = (_dense_rows(each) for each in (query, key, value, a, b))
    num_heads, key_dim, value_dim = state.shape[1:]
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    if out.numel():
        keys = triton.next_power_of_2(key_dim)
        piece = min(triton.next_power_of_2(value_dim), max(1, _TILE // keys))
        gated_delta_rule_kernel[(len(layout.query_lens), num_heads, triton.cdiv(value_dim, piece))](
            query, key, value, a, b, a_log, dt_bias, state, out, *_places(layout, state), num_heads,
            num_heads // key.shape[1],
            query.stride(0), key.stride(0), value.stride(0), a.stride(0), b.stride(0), key_dim**-0.5,
            DK=key_dim, DV=value_dim, KS=keys, BV=piece, num_warps=4,
        )  # fmt: skip
    return out


@implements(ops.wkv)
def wkv(key: Tensor, value: Tensor, decay: Tensor, first: Tensor, state: Tensor, layout: PagedLayout) -> Tensor:
    """Token by token, long runs too, of which torch has no chunks."""
    key, value = _dense_rows(key), _dense_rows(value)
    channels = key.shape[1]
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    if out.numel():
        wkv_kernel[(len(layout.query_lens), triton.cdiv(channels, 128))](
            key, value, decay, first, state, out, *_places(layout, state), channels, key.stride(0), value.stride(0),
            BC=128, num_warps=4,
        )  # fmt: skip
    return out


def _is_long(layout: PagedLayout) -> bool:
    return max(layout.query_lens, default=0) > LONG_RUN


def _places(layout: PagedLayout, state: Tensor) -> tuple[Tensor, Tensor, Tensor, int, int, int]:
    """Where kernels find a step's sequences and their states."""
    return (
        layout.block_table,
        layout.query_start_loc,
        layout.seq_lens,
        layout.block_table.stride(0),
        layout.block_size,
        state.stride(0),
    )


def _dense_rows(x: Tensor) -> Tensor:
    """x with everything behind the first dimension in one piece."""
    inner = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size > 1 and stride != inner:
            return x.contiguous()
        inner *= size
    return x


def calls(shape: NetworkShape, platform: Platform) -> Calls:
    """A decode of each kind of layer, in the sizes of Mamba 2, Mamba, Qwen3-Next and RWKV-4."""
    if not shape.recurrent:
        return
    num, dtype = 16, CACHE_TORCH_DTYPES[shape.dtype]

    def empty(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    def wide(*sizes: int) -> Tensor:
        return empty(*sizes, dtype=torch.float32)

    layout = meta_layout(num, 1, 64 * shape.block_size, shape.block_size)
    x, b = empty(num, 80, 64), empty(num, 1, 128)
    yield shape.dtype, lambda: causal_conv1d(x[:, :, 0], empty(80, 4), x[0, :, 0], wide(9, 3, 80), layout)
    yield (
        shape.dtype,
        lambda: mamba2_scan(x, x[:, :, 0], wide(80), b, b, wide(80), wide(80), wide(9, 80, 64, 128), layout),
    )
    flat, few = empty(num, 5120), empty(num, 16)
    yield (
        shape.dtype,
        lambda: selective_scan(flat, flat, wide(5120, 16), few, few, wide(5120), wide(5120), wide(9, 5120, 16), layout),
    )
    key, value = empty(num, 16, 128), empty(num, 32, 128)
    share = value[:, :, 0]
    yield (
        shape.dtype,
        lambda: gated_delta_rule(key, key, value, share, share, wide(32), wide(32), wide(9, 32, 128, 128), layout),
    )
    yield shape.dtype, lambda: wkv(flat, flat, wide(5120), wide(5120), wide(9, 3, 5120), layout)
