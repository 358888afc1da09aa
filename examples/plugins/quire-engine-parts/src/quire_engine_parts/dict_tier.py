"""`DictConnector`: a tier behind the KV cache that keeps blocks in a dictionary of this process."""

from __future__ import annotations

from collections.abc import Sequence

from quire_interfaces import BlockKey
from quire_kv_transfer.connector_config import ConnectorContext

__all__ = ["DictConnector"]


class DictConnector:
    """Implements `quire_kv_transfer.block_tier.BlockTier`.

    Args:
        context: What is known of the engine; `kv_connector_extra_config.num_blocks` bounds the number of blocks.

    Raises:
        ConfigError: Another member of `kv_connector_extra_config`.
    """

    name = "dictionary"

    def __init__(self, context: ConnectorContext) -> None:
        context.config.check_extra({"num_blocks"})
        self._num_blocks = int(context.config.extra("num_blocks", 1000))
        self._frames: dict[BlockKey, bytes] = {}

    def has(self, key: BlockKey) -> bool:
        """Whether the block is there."""
        return key in self._frames

    def look_up(self, keys: Sequence[BlockKey]) -> None:
        """Nothing: `has` knows."""

    def expect(self, key: BlockKey) -> None:
        """Nothing: memory is ready."""

    def load(self, key: BlockKey, buffers: Sequence[memoryview]) -> bool:
        """Copy a block into place; False where it is not there."""
        frame, start = self._frames.get(key), 0
        if frame is None:
            return False
        for buffer in buffers:
            buffer[:] = frame[start : start + len(buffer)]
            start += len(buffer)
        return True

    def store(self, key: BlockKey, buffers: Sequence[bytes | memoryview]) -> bool:
        """Keep a block, in the place of the oldest one where there is no room."""
        self._frames[key] = b"".join(buffers)
        while len(self._frames) > self._num_blocks:
            self._frames.pop(next(iter(self._frames)), None)
        return True

    def discard(self, key: BlockKey) -> None:
        """The block is not the right one."""
        self._frames.pop(key, None)

    def close(self) -> None:
        """Let go of the memory."""
        self._frames.clear()
