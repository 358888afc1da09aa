"""Multi-head latent attention by the compiled kernels, over all tokens or over those that an index finds.

Knows where the tensors are; the arithmetic is in `csrc/attention.h`, `csrc/index.h` and `csrc/head_linear.h`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_interfaces import FP8_DS_MLA
from quire_kernels_cpu.backend import backend_for
from quire_kernels_cpu.builds import library
from quire_kernels_cpu.decoder import path_pointer
from quire_kernels_cpu.dtypes import DTYPES
from quire_ops import PagedLayout, ops
from quire_ops.latent_attention import torch_write_latent_cache

__all__ = ["head_linear", "index_topk", "latent_attention", "sparse_latent_attention", "write_latent_cache"]


def _is_fp8(latent_cache: Tensor, query: Tensor) -> bool:
    """Whether rows are of the layout in fp8, not of the queries' dtype."""
    fp8 = latent_cache.dtype == torch.uint8
    assert fp8 or latent_cache.dtype == query.dtype, f"latents of {latent_cache.dtype} for queries of {query.dtype}"
    assert latent_cache.stride(2) == 1
    return fp8


@backend_for(ops.write_latent_cache)
def write_latent_cache(entries: Tensor, latent_cache: Tensor, slot_mapping: Tensor, rank: int = 0) -> None:
    """Rows that are no latents in fp8 are written by torch."""
    if latent_cache.dtype != torch.uint8:
        torch_write_latent_cache(entries, latent_cache, slot_mapping, rank)
        return
    entries, slots = entries.contiguous(), slot_mapping.contiguous()
    library().quire_write_latents(
        DTYPES[entries.dtype],
        entries.data_ptr(),
        latent_cache.data_ptr(),
        slots.data_ptr(),
        *entries.shape,
        rank,
        latent_cache.shape[1],
        latent_cache.stride(1),
        latent_cache.stride(0),
    )


@backend_for(ops.latent_attention, trees=True, cache_dtypes=frozenset({FP8_DS_MLA}))
def latent_attention(query: Tensor, latent_cache: Tensor, layout: PagedLayout, *, scale: float, rank: int) -> Tensor:
    """The numbers of a row must be next to each other."""
    fp8 = _is_fp8(latent_cache, query)
    query = query.contiguous()
    num_tokens, num_heads, width = query.shape
    out = query.new_empty(num_tokens, num_heads, rank)
    size = latent_cache.element_size()
    library().quire_latent_attention(
        DTYPES[query.dtype],
        query.data_ptr(),
        latent_cache.data_ptr(),
        fp8,
        out.data_ptr(),
        layout.block_table.data_ptr(),
        layout.block_table.stride(0),
        layout.query_start_loc.data_ptr(),
        layout.seq_lens.data_ptr(),
        len(layout.query_lens),
        num_heads,
        width,
        rank,
        latent_cache.shape[1],
        latent_cache.stride(1) * size,
        latent_cache.stride(0) * size,
        scale,
        *path_pointer(layout),
    )
    return out


@backend_for(ops.index_topk, cache_dtypes=frozenset())
def index_topk(query: Tensor, weights: Tensor, key_cache: Tensor, layout: PagedLayout, *, k: int) -> Tensor:
    """Positions in their order, of equal scores the first; a key's numbers must lie together."""
    assert key_cache.dtype == query.dtype, f"keys of {key_cache.dtype} for queries of {query.dtype}"
    assert key_cache.stride(2) == 1
    query, weights = query.contiguous(), weights.float().contiguous()
    num_tokens, num_heads, width = query.shape
    k = min(k, max(layout.kv_lens))
    out = torch.empty(num_tokens, k, dtype=torch.int64)
    size = key_cache.element_size()
    library().quire_index_topk(
        DTYPES[query.dtype],
        query.data_ptr(),
        weights.data_ptr(),
        key_cache.data_ptr(),
        out.data_ptr(),
        layout.block_table.data_ptr(),
        layout.block_table.stride(0),
        layout.query_start_loc.data_ptr(),
        layout.seq_lens.data_ptr(),
        len(layout.query_lens),
        num_heads,
        width,
        key_cache.shape[1],
        key_cache.stride(1) * size,
        key_cache.stride(0) * size,
        k,
    )
    return out


@backend_for(ops.sparse_latent_attention, cache_dtypes=frozenset({FP8_DS_MLA}))
def sparse_latent_attention(query: Tensor, latent_cache: Tensor, slots: Tensor, *, scale: float, rank: int) -> Tensor:
    """Over all tokens, in their order, it has the bits of `latent_attention`."""
    fp8 = _is_fp8(latent_cache, query)
    query, slots = query.contiguous(), slots.contiguous()
    num_tokens, num_heads, width = query.shape
    out = query.new_empty(num_tokens, num_heads, rank)
    size = latent_cache.element_size()
    library().quire_sparse_latent_attention(
        DTYPES[query.dtype],
        query.data_ptr(),
        latent_cache.data_ptr(),
        fp8,
        out.data_ptr(),
        slots.data_ptr(),
        slots.shape[1],
        latent_cache.shape[0],
        num_tokens,
        num_heads,
        width,
        rank,
        latent_cache.shape[1],
        latent_cache.stride(1) * size,
        latent_cache.stride(0) * size,
        scale,
    )
    return out


@backend_for(ops.head_linear)
def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """A weight whose heads are matrices without gaps is not copied, nor are tokens without."""
    x = x if x.stride(2) == 1 else x.contiguous()
    weight = weight if weight[0].is_contiguous() else weight.contiguous()
    num_tokens, num_heads, inputs = x.shape
    out = torch.empty(num_tokens, num_heads, weight.shape[1], dtype=x.dtype)
    if out.numel():
        library().quire_head_linear(
            DTYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            x.stride(1),
            weight.data_ptr(),
            weight.stride(0),
            out.data_ptr(),
            num_tokens,
            num_heads,
            inputs,
            weight.shape[1],
        )
    return out
