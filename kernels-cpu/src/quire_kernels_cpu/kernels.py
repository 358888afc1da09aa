"""The compiled kernels as backends of ops: which library fits this processor, and how tensors reach it.

A call crosses the C ABI with raw pointers and sizes; nothing is copied. What a kernel does not serve (prefill chunks,
a soft cap, a cache of another dtype) goes to torch's operators within the same op.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quire_ops import OpBackend, SizeRule
from quire_ops.attention_plan import AttentionPlan, make_plan
from quire_ops.declarations import PagedLayout
from quire_ops.torch_attention import attend_prefills
from quire_ops.torch_attention import paged_attention as torch_paged_attention

__all__ = ["backends", "paged_attention", "unavailable"]

MAX_HEAD_DIM = 256
MAX_QUERIES_PER_KV_HEAD = 16
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}

_INT32_POINTER, _POINTER = ctypes.c_void_p, ctypes.c_void_p
_ARGUMENTS = (
    [_POINTER] * 3 + [_INT32_POINTER, ctypes.c_int64] + [_INT32_POINTER] * 3
    + [ctypes.c_int] * 5 + [ctypes.c_float] + [ctypes.c_int] * 2
)  # fmt: skip


def instruction_set() -> str | None:
    """The best instruction set that kernels exist for and this processor has (torch's own detection, which
    ATEN_CPU_CAPABILITY can lower)."""
    capability = torch.backends.cpu.get_cpu_capability().upper()
    if capability.startswith(("AVX512", "AMX")):
        return "avx512"
    return "avx2" if capability == "AVX2" else None


@cache
def _load() -> Callable[..., None] | str:
    """The decode kernel, or why there is none."""
    name = instruction_set()
    if name is None:
        return f"needs AVX2 or AVX-512, this processor has {torch.backends.cpu.get_cpu_capability()}"
    path = Path(__file__).with_name(f"kernels_{name}.so")
    if not path.is_file():
        return "was not compiled: install a C++ compiler (g++) and install quire-kernels-cpu again"
    try:
        kernel = ctypes.CDLL(str(path)).quire_paged_decode
    except OSError as error:
        return f"cannot be loaded: {error}"
    kernel.restype, kernel.argtypes = None, _ARGUMENTS
    return kernel  # type: ignore[no-any-return]


def unavailable() -> str | None:
    """Why the kernels cannot serve in this process, or None."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


def backends() -> list[OpBackend]:
    """The entry point of group `quire.ops`."""
    return [
        OpBackend(
            op="paged_attention",
            name="cpu",
            function=paged_attention,
            priority=10,
            devices=frozenset({"cpu"}),
            dtypes=frozenset(_DTYPES),
            sizes={
                "head_dim": SizeRule(maximum=MAX_HEAD_DIM),
                "queries_per_kv_head": SizeRule(maximum=MAX_QUERIES_PER_KV_HEAD),
            },
            unavailable=unavailable(),
        )
    ]


class _Step(NamedTuple):
    """What a step's decodes need, worked out for its first layer."""

    sequences: Tensor
    """[n] int32: rows of the block table."""
    query_rows: Tensor
    """[n] int32."""
    kv_lens: Tensor
    """[n] int32."""
    prefills: AttentionPlan | None


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    layout: PagedLayout,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Op `paged_attention` (see `quire_ops.declarations`): decodes by the kernel, prefill chunks by torch."""
    kernel = _load()
    serves = query.dtype in _DTYPES and query.dtype == kv_cache.dtype and kv_cache.is_contiguous() and soft_cap is None
    if isinstance(kernel, str) or not serves:
        return torch_paged_attention(
            query, kv_cache, layout, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap
        )
    num_blocks, block_size, _, num_kv_heads, head_dim = kv_cache.shape
    slots = kv_cache.view(num_blocks * block_size, 2, num_kv_heads, head_dim)
    key = ("cpu", sliding_window)
    step: _Step | None = layout.derived.get(key)
    if step is None:
        step = layout.derived[key] = _plan(layout, slots, query.dtype, sliding_window)
    query = query.contiguous()
    out = torch.empty_like(query)
    if step.prefills is not None:
        attend_prefills(out, query, slots, step.prefills, scale, sliding_window)
    if len(step.sequences):
        kernel(
            query.data_ptr(),
            kv_cache.data_ptr(),
            out.data_ptr(),
            layout.block_table.data_ptr(),
            layout.block_table.stride(0),
            step.sequences.data_ptr(),
            step.query_rows.data_ptr(),
            step.kv_lens.data_ptr(),
            len(step.sequences),
            query.shape[1],
            num_kv_heads,
            head_dim,
            block_size,
            scale,
            sliding_window or 0,
            _DTYPES[query.dtype],
        )
    return out


def _plan(layout: PagedLayout, slots: Tensor, dtype: torch.dtype, sliding_window: int | None) -> _Step:
    decoding, begin = [], 0
    for row, (query_len, kv_len) in enumerate(zip(layout.query_lens, layout.kv_lens, strict=True)):
        if query_len == 1:
            decoding.append((row, begin, kv_len))
        begin += query_len
    # The longest first, so that no thread is left with one at the end.
    decoding.sort(key=lambda entry: -entry[2])
    table = torch.tensor(decoding, dtype=torch.int32).reshape(-1, 3).t().contiguous()
    has_prefills = any(query_len > 1 for query_len in layout.query_lens)
    prefills = make_plan(layout, slots, dtype, sliding_window, with_decodes=False) if has_prefills else None
    return _Step(table[0], table[1], table[2], prefills)
