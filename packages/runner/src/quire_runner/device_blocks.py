"""The KV cache of an accelerator as bytes, block by block: copies by way of host memory, beside the steps.

Steps are launched on one stream, and the host runs ahead of them. So a copy waits, on the device,
for what was launched before it, and nothing that is launched later waits for a copy: blocks to store are gathered
behind the steps, at the device's own speed, and go to the host on a stream of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_interfaces import BlockMemory, ConfigError
from quire_interfaces.kv_cache import KVCachePlan
from quire_interfaces.platforms import Platform
from quire_runner.block_bytes import block_rows

__all__ = ["DeviceBlocks"]


class DeviceBlocks(BlockMemory):
    """Implements `quire_interfaces.BlockMemory` for caches on an accelerator.

    Args:
        plan: Groups and number of blocks.
        caches: Layer name -> cache, as from `allocate_kv_caches`.
        platform: What the device is one of.
        device: The device, as the setting names it.

    Raises:
        ConfigError: a cache whose blocks are not each one piece of it.
    """

    def __init__(self, plan: KVCachePlan, caches: Mapping[str, Tensor], platform: Platform, device: str) -> None:
        self._platform, self._device = platform, device
        self._groups = tuple(
            tuple(block_rows(name, caches[name], plan.num_blocks, group.spec.block_bytes) for name in group.layer_names)
            for group in plan.groups
        )
        self._ends = [list(accumulate(rows.shape[1] for rows in layers)) for layers in self._groups]
        platform.use(device)  # streams are of the thread's device
        self._stores, self._loads = self._runtime.Stream(), self._runtime.Stream()

    @property
    def _runtime(self) -> Any:
        return self._platform.runtime()

    def _host(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.uint8, pin_memory=self._platform.pins_memory)

    def buffers(self, group: int, block_id: int) -> list[memoryview]:
        """ConfigError: the host cannot address the cache."""
        raise ConfigError(
            f"the KV cache is on {self._device}, where NixlConnector does not read it yet; take SocketConnector, or "
            "let engines share a block store (kv_tier)",
            field="kv_transfer_config",
        )

    def content(self, group: int, block_id: int) -> bytes:
        """See `quire_interfaces.BlockMemory`."""
        self._platform.use(self._device)
        rows = [rows[block_id] for rows in self._groups[group]]
        with torch.inference_mode(), self._runtime.stream(self._stores):
            return torch.cat(rows).cpu().numpy().tobytes()

    def snapshot(self, places: Sequence[tuple[int, int]]) -> Callable[[], list[bytes]]:
        """See `quire_interfaces.BlockMemory`. Until they are copied the blocks are twice on the device."""
        indices: dict[int, list[int]] = {}
        for index, (group, _) in enumerate(places):
            indices.setdefault(group, []).append(index)
        with torch.inference_mode():
            copied = [
                (found, self._to_host(self._gathered(group, [places[index][1] for index in found])))
                for group, found in indices.items()
            ]
            done = self._runtime.Event()
            done.record(self._stores)

        def read() -> list[bytes]:
            done.synchronize()
            blocks = {index: row.tobytes() for found, rows in copied for index, row in zip(found, rows, strict=True)}
            return [blocks[index] for index in range(len(places))]

        return read

    def _gathered(self, group: int, block_ids: Sequence[int]) -> Tensor:
        """The bytes of blocks on the device [blocks, bytes of all layers], behind the steps launched so far."""
        layers, ends = self._groups[group], self._ends[group]
        ids = torch.tensor(block_ids, pin_memory=self._platform.pins_memory).to(layers[0].device, non_blocking=True)
        together = layers[0].new_empty(len(block_ids), ends[-1])
        for rows, end in zip(layers, ends, strict=True):
            together[:, end - rows.shape[1] : end] = rows.index_select(0, ids)
        return together

    def _to_host(self, gathered: Tensor) -> NDArray[np.uint8]:
        """Begin to copy; the copy is whole when `_stores` has come so far."""
        host = self._host(*gathered.shape)
        self._stores.wait_stream(self._runtime.current_stream())
        with self._runtime.stream(self._stores):
            host.copy_(gathered, non_blocking=True)
        if gathered.device.type != "cpu":
            gathered.record_stream(self._stores)  # not for others until it is copied
        return host.numpy()

    def launched(self) -> object:
        """See `quire_interfaces.BlockMemory`."""
        event = self._runtime.Event()
        event.record(self._runtime.current_stream())
        return event

    def load(
        self, group: int, block_id: int, read: Callable[[Sequence[memoryview]], bool], after: object = None
    ) -> bool:
        """See `quire_interfaces.BlockMemory`."""
        layers, ends = self._groups[group], self._ends[group]
        host = self._host(ends[-1])
        pieces = [host[end - rows.shape[1] : end] for rows, end in zip(layers, ends, strict=True)]
        if not read([memoryview(piece.numpy().data) for piece in pieces]):
            return False
        self._platform.use(self._device)
        with torch.inference_mode(), self._runtime.stream(self._loads):
            if after is not None:
                self._loads.wait_event(after)
            for rows, piece in zip(layers, pieces, strict=True):
                rows[block_id].copy_(piece, non_blocking=True)
            arrived = self._runtime.Event()
            arrived.record(self._loads)
        arrived.synchronize()
        return True
