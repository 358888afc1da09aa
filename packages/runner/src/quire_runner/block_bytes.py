"""The KV cache as bytes, block by block, for what copies blocks from and to other places.

Shares memory with the layers' caches; knows their strides, not what is in them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_interfaces.errors import ConfigError
from quire_interfaces.kv_cache import KVCachePlan

__all__ = ["BlockBytes"]


class BlockBytes:
    """Implements `quire_interfaces.BlockMemory` for caches in host memory.

    Args:
        plan: Groups and number of blocks.
        caches: Layer name -> cache, as from `allocate_kv_caches`.

    Raises:
        ConfigError: a cache is not in host memory, or its blocks are not each one piece of it.
    """

    def __init__(self, plan: KVCachePlan, caches: Mapping[str, Tensor]) -> None:
        self._groups = tuple(
            tuple(_rows(name, caches[name], plan.num_blocks, group.spec.block_bytes) for name in group.layer_names)
            for group in plan.groups
        )

    def buffers(self, group: int, block_id: int) -> list[memoryview]:
        """Bytes of a block, one writable buffer for each layer of the group."""
        return [memoryview(rows[block_id]) for rows in self._groups[group]]


def _rows(name: str, cache: Tensor, num_blocks: int, block_bytes: int) -> NDArray[np.uint8]:
    """[num_blocks, block_bytes], sharing memory with the cache."""
    if cache.device.type != "cpu":
        raise ConfigError(
            f"blocks can be copied from and to host memory only, and the KV cache lies on {cache.device}; "
            "leave kv_disk_path empty, or run on the CPU",
            field="kv_disk_path",
        )
    if cache.shape[0] != num_blocks or not cache[0].is_contiguous():
        raise ConfigError(
            f"the attention backend's cache shape {tuple(cache.shape)} of layer {name!r} does not keep a block's bytes "
            "together; leave kv_disk_path empty, or choose another attention backend",
            field="kv_disk_path",
        )
    flat = torch.as_strided(cache.view(torch.uint8), (num_blocks, block_bytes), (cache.stride(0) * cache.itemsize, 1))
    return flat.numpy()
