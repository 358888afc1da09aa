"""What stands between projections and attention, in one call of the compiled kernels: op `rope_and_write_kv`.

Shape legend: T tokens of the step, Hq query heads, Hkv key-value heads, D head dimension.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from quire_kernels_cpu.backend import backend_for
from quire_kernels_cpu.builds import library
from quire_kernels_cpu.decoder import cache_format, pointers_to
from quire_kernels_cpu.dtypes import DTYPES
from quire_ops import ops
from quire_ops.kv_cache_ops import torch_rotary_embedding, torch_write_kv_cache
from quire_ops.norms import torch_rms_norm

__all__ = ["rope_and_write_kv"]


@backend_for(ops.rope_and_write_kv)
def rope_and_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_scale: Tensor | None = None,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Caches that the kernels do not know go to torch's operators."""
    number = cache_format(kv_cache, query.dtype)
    if number is None or not kv_cache[0].is_contiguous():
        query, key = (
            torch_rotary_embedding(
                x if norm is None else torch_rms_norm(x.float(), norm.float(), eps).to(x.dtype), cos, sin
            )
            for x, norm in ((query, query_norm), (key, key_norm))
        )
        torch_write_kv_cache(key, value, kv_cache, slot_mapping, kv_scale)
        return query
    heads = [_with_whole_heads(each) for each in (query, key, value)]
    cos, sin, slots = cos.contiguous(), sin.contiguous(), slot_mapping.contiguous()
    scale = None if kv_scale is None else kv_scale.float().contiguous()
    wide = query_norm is not None and query_norm.dtype == torch.float32
    norms = [None if norm is None else norm.contiguous() for norm in (query_norm, key_norm)]
    assert all(norm is None or norm.dtype == (torch.float32 if wide else query.dtype) for norm in norms)
    out = torch.empty(query.shape, dtype=query.dtype)
    library().quire_rope_and_write_kv(
        DTYPES[query.dtype],
        pointers_to(heads),
        (ctypes.c_int64 * 3)(*(each.stride(0) for each in heads)),
        out.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        *(None if norm is None else norm.data_ptr() for norm in norms),
        wide,
        eps,
        kv_cache.data_ptr(),
        number,
        None if scale is None else scale.data_ptr(),
        slots.data_ptr(),
        len(query),
        query.shape[1],
        key.shape[1],
        query.shape[2],
        kv_cache.shape[3],
        kv_cache.stride(0) * kv_cache.element_size(),
    )
    return out


def _with_whole_heads(x: Tensor) -> Tensor:
    """x [T, H, D] whose heads lie side by side; tokens may be apart."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
