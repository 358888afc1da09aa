"""A tier in host memory: blocks that the KV cache has no room for, at the speed of a copy, until the process ends."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from quire_interfaces import BlockKey
from quire_kv_transfer.block_frame import BlockFormatError

__all__ = ["HostMemoryTier"]


class HostMemoryTier:
    """Implements `BlockTier`; the least recently used go first.

    Args:
        size_bytes: Most bytes of all frames together.
    """

    name = "host memory tier"

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.used_bytes = 0
        """Bytes of the frames that are there."""
        self._frames: OrderedDict[BlockKey, bytearray] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._frames)

    def has(self, key: BlockKey) -> bool:
        """Whether the frame is there."""
        return key in self._frames

    def look_up(self, keys: Sequence[BlockKey]) -> None:
        """Nothing: `has` knows."""

    def expect(self, key: BlockKey) -> None:
        """Nothing: memory is ready."""

    def load(self, key: BlockKey, buffers: Sequence[memoryview]) -> bool:
        """Copy a frame into place. Raises BlockFormatError when it has another length."""
        frame = self.frame(key)
        if frame is None:
            return False
        num_bytes = sum(map(len, buffers))
        if len(frame) != num_bytes:
            raise BlockFormatError(f"it has {len(frame)} bytes and should have {num_bytes}")
        start, whole = 0, memoryview(frame)
        for buffer in buffers:
            buffer[:] = whole[start : start + len(buffer)]
            start += len(buffer)
        return True

    def frame(self, key: BlockKey) -> bytearray | None:
        """The frame itself, not to be changed; None where there is none. It stays whole while it is held."""
        with self._lock:
            frame = self._frames.get(key)
            if frame is not None:
                self._frames.move_to_end(key)
            return frame

    def store(self, key: BlockKey, buffers: Sequence[bytes | memoryview]) -> bool:
        """Copy a frame. False for one that is larger than everything together may be."""
        return self.keep(key, bytearray().join(buffers))

    def keep(self, key: BlockKey, frame: bytearray) -> bool:
        """Take a frame over, without a copy. False for one that is larger than everything together may be."""
        if len(frame) > self.size_bytes:
            return False
        with self._lock:
            self._drop(key)
            while self.used_bytes + len(frame) > self.size_bytes:
                self._drop(next(iter(self._frames)))
            self._frames[key] = frame
            self.used_bytes += len(frame)
        return True

    def _drop(self, key: BlockKey) -> None:
        frame = self._frames.pop(key, None)
        if frame is not None:
            self.used_bytes -= len(frame)

    def discard(self, key: BlockKey) -> None:
        """Drop a frame."""
        with self._lock:
            self._drop(key)

    def close(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._frames.clear()
            self.used_bytes = 0
