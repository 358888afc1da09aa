"""The KV cache as bytes, block by block, for what copies blocks from and to other places.

Shares memory with the layers' caches; knows their strides, not what is in them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire_interfaces import BlockMemory
from quire_interfaces.errors import ConfigError
from quire_interfaces.kv_cache import KVCachePlan

__all__ = ["BlockBytes", "block_rows"]


class BlockBytes(BlockMemory):
    """Implements `quire_interfaces.BlockMemory` for caches in host memory.

    Args:
        plan: Groups and number of blocks.
        caches: Layer name -> cache, as from `allocate_kv_caches`.

    Raises:
        ConfigError: a cache whose blocks are not each one piece of it.
    """

    def __init__(self, plan: KVCachePlan, caches: Mapping[str, Tensor]) -> None:
        self._groups = tuple(
            tuple(
                block_rows(name, caches[name], plan.num_blocks, group.spec.block_bytes).numpy()
                for name in group.layer_names
            )
            for group in plan.groups
        )

    def buffers(self, group: int, block_id: int) -> list[memoryview]:
        """Bytes of a block, one writable buffer for each layer of the group."""
        return [memoryview(rows[block_id]) for rows in self._groups[group]]


def block_rows(name: str, cache: Tensor, num_blocks: int, block_bytes: int) -> Tensor:
    """The bytes of a layer's blocks [num_blocks, block_bytes], sharing memory with its cache.

    Raises:
        ConfigError: a block is not one piece of the cache.
    """
    if cache.shape[0] != num_blocks or not cache[0].is_contiguous():
        raise ConfigError(
            f"the attention backend's cache shape {tuple(cache.shape)} of layer {name!r} does not keep a block's bytes "
            "together; leave kv_disk_path empty, or choose another attention backend",
            field="kv_disk_path",
        )
    return torch.as_strided(cache.view(torch.uint8), (num_blocks, block_bytes), (cache.stride(0) * cache.itemsize, 1))
