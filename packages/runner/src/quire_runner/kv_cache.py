"""Allocation of the KV cache from its plan: one flat tensor per plan tensor, viewed once per layer.

Knows bytes and shapes; which block belongs to whom is the block pool's business. All memory begins as zeros: slots
that were never written are still read by padded kernels, and whatever they hold must be finite.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from math import prod

import numpy as np
import torch
from torch import Tensor

from quire_interfaces.errors import ConfigError
from quire_interfaces.kv_cache import FullAttentionSpec, KVCachePlan, LatentAttentionSpec, MambaSpec, kv_row_bytes
from quire_models.mapped_pages import discard_pages
from quire_ops import CACHE_TORCH_DTYPES
from quire_ops.kv_format import rows_of

__all__ = ["CacheShape", "allocate_kv_caches", "copy_tokens", "give_back_pages", "layer_states"]

CacheShape = Callable[[int, int, int, int], tuple[int, ...]]
"""(num_blocks, block_size, num_kv_heads, elements of a row) -> the shape that the attention backend asks for."""


def allocate_kv_caches(plan: KVCachePlan, *, device: torch.device | str, cache_shape: CacheShape) -> dict[str, Tensor]:
    """Allocate the plan's tensors and view them per layer.

    Args:
        plan: Groups, number of blocks, and bytes per block of each tensor.
        device: Where the cache lives.
        cache_shape: The attention backend's shape of one layer's cache.

    Returns:
        Layer name -> the layer's cache, in the backend's shape; [num_blocks, block_size, row] where a layer keeps
        latents, bytes [num_blocks, block_bytes] where it keeps states.
        Layers of different groups may share memory: their blocks have different ids.

    Raises:
        ConfigError: the plan does not fit the backend.
    """
    storages = [_zeros(plan.num_blocks * size, device) for size in plan.tensor_block_bytes]
    caches: dict[str, Tensor] = {}
    for group in plan.groups:
        spec = group.spec
        if isinstance(spec, MambaSpec):
            for name, storage, block_bytes in zip(group.layer_names, storages, plan.tensor_block_bytes, strict=False):
                caches[name] = storage.view(plan.num_blocks, block_bytes)[:, : spec.block_bytes]
            continue
        if isinstance(spec, LatentAttentionSpec):
            dtype = CACHE_TORCH_DTYPES[spec.dtype]
            rows = (plan.num_blocks, spec.block_size // spec.dcp_size, spec.row_bytes // dtype.itemsize)
            for name, storage, block_bytes in zip(group.layer_names, storages, plan.tensor_block_bytes, strict=False):
                caches[name] = _view(storage, block_bytes, spec.block_bytes, rows, plan.num_blocks, dtype)
            continue
        if not isinstance(spec, FullAttentionSpec):
            raise ConfigError(
                f"the runner has no cache layout for {type(spec).__name__} (layers {group.layer_names[0]!r}, ...); "
                "use a model whose layers attend in full or over a window, or keep states"
            )
        dtype = CACHE_TORCH_DTYPES[spec.dtype]
        row_size = kv_row_bytes(spec.dtype, spec.head_dim) // dtype.itemsize
        shape = tuple(cache_shape(plan.num_blocks, spec.block_size // spec.dcp_size, spec.num_kv_heads, row_size))
        if prod(shape) * dtype.itemsize != plan.num_blocks * spec.block_bytes:
            raise ConfigError(
                f"the attention backend's cache shape {shape} takes {prod(shape) * dtype.itemsize} bytes, but the "
                f"plan has {plan.num_blocks * spec.block_bytes} for a layer; plan with the backend's own layout"
            )
        for name, storage, block_bytes in zip(group.layer_names, storages, plan.tensor_block_bytes, strict=False):
            caches[name] = _view(storage, block_bytes, spec.block_bytes, shape, plan.num_blocks, dtype)
    return caches


def layer_states(plan: KVCachePlan, caches: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, ...]]:
    """Layer name -> its state tensors [num_blocks, *shape], views of its cache; only layers that keep states."""
    states: dict[str, tuple[Tensor, ...]] = {}
    for group in plan.groups:
        if not isinstance(group.spec, MambaSpec):
            continue
        for name in group.layer_names:
            views, begin = [], 0
            for state in group.spec.states:
                dtype: torch.dtype = getattr(torch, state.dtype)
                end = begin + prod(state.shape) * dtype.itemsize
                views.append(caches[name][:, begin:end].view(dtype).view(plan.num_blocks, *state.shape))
                begin += state.num_bytes
            states[name] = tuple(views)
    return states


def copy_tokens(cache: Tensor, block_size: int, sources: Tensor, targets: Tensor) -> None:
    """Copy what a layer keeps of tokens from slots [N] to other slots [N]; a slot may be both.

    Args:
        cache: [num_blocks, 2, heads, block_size, row], or [num_blocks, block_size, row] of latents.
        block_size: Tokens of a block.
        sources: Slots, block * block_size + place in it; `targets` likewise.
    """
    for part in (cache,) if cache.dim() == 3 else rows_of(cache):
        tokens = part.movedim(1 if cache.dim() == 3 else 3, 1)
        tokens[targets // block_size, targets % block_size] = tokens[sources // block_size, sources % block_size]


def give_back_pages(caches: Iterable[Tensor]) -> int:
    """Give the memory of caches on the CPU back to the system. They stay where they are: pages that are touched again
    are zeros, as in the beginning.

    Args:
        caches: From `allocate_kv_caches`; nobody reads or writes them meanwhile, and what they hold is lost.

    Returns:
        Bytes of the pages; those that were never touched count, too.

    Raises:
        ConfigError: the system cannot take them back (it is not Linux).
        OSError: it refused.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigError("memory of a KV cache can be given back on Linux only")
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in caches}
    return sum(discard_pages(address, num_bytes) for address, num_bytes in storages.items())


def _zeros(num_bytes: int, device: torch.device | str) -> Tensor:
    if torch.device(device).type == "cpu":
        # numpy asks the system for zero pages, which cost nothing until they are touched: a large cache does not
        # delay the start.
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def _view(
    storage: Tensor,
    tensor_block_bytes: int,
    block_bytes: int,
    shape: tuple[int, ...],
    num_blocks: int,
    dtype: torch.dtype,
) -> Tensor:
    elements = storage.view(dtype)
    if tensor_block_bytes == block_bytes:
        return elements.view(shape)
    # A layer with smaller blocks than its tensor: every block keeps its own place, the rest of it stays unused. This
    # needs blocks as the outermost dimension, otherwise blocks of two groups would meet.
    if shape[0] != num_blocks:
        raise ConfigError(
            f"layers with {block_bytes} and {tensor_block_bytes} bytes per block cannot share a tensor in the cache "
            f"shape {shape}; use an attention backend whose shape begins with the number of blocks ({num_blocks})"
        )
    strides = [tensor_block_bytes // dtype.itemsize]
    inner = [prod(shape[i + 1 :]) for i in range(1, len(shape))]
    return elements.as_strided(shape, (*strides, *inner))
