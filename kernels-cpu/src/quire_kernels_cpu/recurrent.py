"""The recurrent ops through the kernels of `csrc/recurrent.h`."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from quire_kernels_cpu.backend import MAX_KEY_HEAD_DIM, MAX_TAPS, backend_for
from quire_kernels_cpu.builds import library
from quire_kernels_cpu.dtypes import DTYPES
from quire_ops import PagedLayout, SizeRule, ops

__all__ = ["causal_conv1d", "gated_delta_rule", "mamba2_scan", "selective_scan", "wkv"]


@backend_for(ops.causal_conv1d, sizes={"taps": SizeRule(maximum=MAX_TAPS)})
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, layout: PagedLayout, *, activation: str | None = None
) -> Tensor:
    """A weight whose channels are next to each other is not copied."""
    x, taps = _with_dense_rows(x), weight.t().contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    library().quire_causal_conv1d(
        DTYPES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        taps.data_ptr(),
        None if bias is None else bias.data_ptr(),
        state.data_ptr(),
        state.stride(0),
        out.data_ptr(),
        *_where(layout, len(x)),
        x.shape[1],
        weight.shape[1],
        activation == "silu",
    )
    return out


@backend_for(ops.mamba2_scan)
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
    _, heads, size = x.shape
    _, groups, numbers = b.shape
    out = torch.empty(x.shape, dtype=x.dtype)
    arguments = _arguments((x, dt, b, c), (a, d, dt_bias), state, out, layout)
    library().quire_mamba2_scan(*arguments, heads, size, groups, numbers, *dt_limit)
    return out


@backend_for(ops.selective_scan)
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
    out = torch.empty(x.shape, dtype=x.dtype)
    arguments = _arguments((x, dt, b, c), (a, d, dt_bias), state, out, layout)
    library().quire_selective_scan(*arguments, x.shape[1], b.shape[1])
    return out


@backend_for(ops.gated_delta_rule, sizes={"key_head_dim": SizeRule(maximum=MAX_KEY_HEAD_DIM)})
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
    _, keys, key_size = key.shape
    _, values, value_size = value.shape
    out = torch.empty(value.shape, dtype=value.dtype)
    arguments = _arguments((query, key, value, a, b), (a_log, dt_bias), state, out, layout)
    library().quire_gated_delta_rule(*arguments, keys, values, key_size, value_size)
    return out


@backend_for(ops.wkv)
def wkv(key: Tensor, value: Tensor, decay: Tensor, first: Tensor, state: Tensor, layout: PagedLayout) -> Tensor:
    out = torch.empty(value.shape, dtype=value.dtype)
    library().quire_wkv(*_arguments((key, value), (decay, first), state, out, layout), value.shape[1])
    return out


def _with_dense_rows(x: Tensor) -> Tensor:
    """The tensor itself when the numbers of each row are next to each other, else a copy."""
    return x if x[0].is_contiguous() else x.contiguous()


def _arguments(
    tensors: tuple[Tensor, ...], fixed: tuple[Tensor, ...], state: Tensor, out: Tensor, layout: PagedLayout
) -> tuple[Any, ...]:
    dense = [_with_dense_rows(tensor) for tensor in tensors]
    pointers = (ctypes.c_void_p * len(dense))(*(tensor.data_ptr() for tensor in dense))
    strides = (ctypes.c_int64 * len(dense))(*(tensor.stride(0) for tensor in dense))
    # The array of pointers does not keep what it points to, so the copies stay with it until the call is over.
    pointers.kept = dense  # type: ignore[attr-defined]
    constants = (ctypes.c_void_p * len(fixed))(*(tensor.data_ptr() for tensor in fixed))
    return (
        DTYPES[out.dtype],
        pointers,
        strides,
        constants,
        state.data_ptr(),
        state.stride(0),
        out.data_ptr(),
        *_where(layout, len(out)),
    )


def _where(layout: PagedLayout, num_tokens: int) -> tuple[Any, Any]:
    """Where the states are, as the kernels take it; made once per step."""
    found: tuple[Any, Any] | None = layout.derived.get("cpu_states")
    if found is None:
        kv_lens = torch.tensor(layout.kv_lens, dtype=torch.int32)
        places = (layout.block_table, layout.query_start_loc, kv_lens)
        pointers = (ctypes.c_void_p * 3)(*(place.data_ptr() for place in places))
        pointers.kept = kv_lens  # type: ignore[attr-defined]
        sizes = (layout.block_table.stride(0), len(layout.query_lens), layout.block_size, num_tokens)
        found = layout.derived["cpu_states"] = (pointers, (ctypes.c_int64 * 4)(*sizes))
    return found
