"""What keeps blocks behind the KV cache: host memory, a folder, a block server. All are alike to those above them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire_interfaces import BlockKey

__all__ = ["BlockTier"]


class BlockTier(Protocol):
    """Keeps frames (`block_frame`) under their keys, within a bound of its own. Thread-safe.

    Frames are opaque: whether one is whole and the right one is checked by who reads it. What raises anything but
    `BlockFormatError` is taken for broken and not used any more; a tier that may recover raises nothing.
    """

    @property
    def name(self) -> str:
        """What it is called in logs, e.g. "disk tier /var/kv"."""

    def has(self, key: BlockKey) -> bool:
        """Whether the frame is there, as far as is known. Never waits: it is asked while a step is planned."""

    def look_up(self, keys: Sequence[BlockKey]) -> None:
        """Find out which of these are there, for `has`, in one question. Waits for a fraction of a second at most; a
        tier whose `has` knows anyway does nothing."""

    def expect(self, key: BlockKey) -> None:
        """The frame will be loaded soon."""

    def load(self, key: BlockKey, buffers: Sequence[memoryview]) -> bool:
        """Copy a frame into buffers that are as long as it, together. Rubbish is left in them when it is not there.

        Raises:
            BlockFormatError: what is there has another length.
        """

    def store(self, key: BlockKey, buffers: Sequence[bytes | memoryview]) -> bool:
        """Keep a frame, given in pieces, at the cost of those that were used longest ago. Whether it was taken."""

    def discard(self, key: BlockKey) -> None:
        """What is there under this key is not the right frame."""

    def close(self) -> None:
        """Let go of connections and memory. Idempotent."""
