"""Tiers on top of one another, the fastest first: written to all, read from the first that has the block whole.

A block that a lower tier gave is kept by those above it, too. A frame that is damaged or foreign is discarded, and the
next tier is asked. A tier that breaks is left out from then on, with one warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from quire_interfaces import BlockKey, BlockMemory
from quire_kv_transfer.block_frame import HEADER_BYTES, BlockFormatError, check_frame, frame_header
from quire_kv_transfer.block_tier import BlockTier
from quire_kv_transfer.folder import warn_switched_off
from quire_kv_transfer.tier_connector import TierConnector
from quire_kv_transfer.tier_worker import TierWorker

__all__ = ["MAX_DEVICE_STORE_BYTES", "MAX_STORE_BYTES", "TierStack"]

_logger = logging.getLogger(__name__)

MAX_STORE_BYTES = 256 << 20
"""Copies that wait to be written: what a disk writes in a fraction of a second, and what a long prefill leaves."""
MAX_DEVICE_STORE_BYTES = 64 << 20
"""The same where each is first a copy on the device: what goes to the host's memory in some milliseconds."""

_Answer = TypeVar("_Answer")


class TierStack:
    """The tiers of one engine.

    Args:
        tiers: Fastest first. Owned from now on: `close` closes them.
        fingerprint: 32 bytes from `model_fingerprint`.
        block_bytes: Bytes of a block, per KV cache group.
        max_wanted: Most blocks remembered as still to be stored; the blocks of the KV cache are a good bound.
        max_store_bytes: Most bytes of copies that wait to be written.
    """

    def __init__(
        self,
        tiers: Sequence[BlockTier],
        fingerprint: bytes,
        block_bytes: Sequence[int],
        *,
        max_wanted: int = 100_000,
        max_store_bytes: int = MAX_STORE_BYTES,
    ) -> None:
        self._tiers = tuple(tiers)
        self._fingerprint = fingerprint
        self.connector = TierConnector(self, block_bytes, max_store_bytes=max_store_bytes, max_wanted=max_wanted)
        """The scheduler's half."""

    @property
    def is_stopped(self) -> bool:
        """Whether no tier is left."""
        return not self._tiers

    @property
    def names(self) -> str:
        """What the tiers are called, for logs."""
        return ", ".join(tier.name for tier in self._tiers)

    def make_worker(self, memory: BlockMemory, *, late_after_s: float = 10.0) -> TierWorker:
        """The runner's half. It has threads: close it.

        Args:
            memory: The KV cache.
            late_after_s: Seconds without a block after which loads under way are reported as late.
        """
        return TierWorker(self, memory, late_after_s=late_after_s)

    def contains(self, key: BlockKey) -> bool:
        """Whether any tier has the block, as far as is known."""
        return any(tier.has(key) for tier in self._tiers)

    def is_kept(self, key: BlockKey) -> bool:
        """Whether every tier has the block."""
        return all(tier.has(key) for tier in self._tiers)

    def look_up(self, keys: Sequence[BlockKey]) -> None:
        """Find out which tiers have these blocks."""
        for tier in self._tiers:
            self._attempt(tier, partial(tier.look_up, keys), None)

    def expect(self, key: BlockKey) -> None:
        """Tell the first tier that has the block that it will be read soon."""
        tier = next((tier for tier in self._tiers if tier.has(key)), None)
        if tier is not None:
            self._attempt(tier, lambda: tier.expect(key), None)

    def read(self, key: BlockKey, buffers: Sequence[memoryview]) -> bool:
        """Read a block into its place.

        Args:
            key: The block.
            buffers: Writable bytes, together as long as the block; rubbish is left in them where it is not there.

        Returns:
            Whether there was such a block, whole.
        """
        header = bytearray(HEADER_BYTES)
        frame = [memoryview(header), *buffers]
        above: list[BlockTier] = []
        for tier in self._tiers:
            if self._attempt(tier, partial(self._load, tier, key, frame), False):
                for other in above:
                    self._attempt(other, partial(other.store, key, frame), False)
                return True
            above.append(tier)
        return False

    def _load(self, tier: BlockTier, key: BlockKey, frame: Sequence[memoryview]) -> bool:
        try:
            if not tier.load(key, frame):
                return False
            check_frame(bytes(frame[0]), frame[1:], self._fingerprint, key)
        except BlockFormatError as error:
            _logger.warning("removed block %s from the %s: %s", key.block_hash.hex(), tier.name, error)
            tier.discard(key)
            return False
        return True

    def write(self, key: BlockKey, payload: bytes | memoryview) -> bool:
        """Write a block to the tiers that do not have it; whether any has it now."""
        frame = [frame_header(self._fingerprint, key, [payload]), payload]
        arrived = False
        for tier in self._tiers:
            if tier.has(key) or self._attempt(tier, partial(tier.store, key, frame), False):
                arrived = True
        return arrived

    def discard(self, key: BlockKey) -> None:
        """Drop a block from all tiers."""
        for tier in self._tiers:
            self._attempt(tier, partial(tier.discard, key), None)

    def _attempt(self, tier: BlockTier, action: Callable[[], _Answer], otherwise: _Answer) -> _Answer:
        try:
            return action()
        except Exception as error:
            if tier in self._tiers:
                self._tiers = tuple(each for each in self._tiers if each is not tier)
                warn_switched_off(tier.name, error)
            return otherwise

    def close(self) -> None:
        """Close all tiers."""
        for tier in self._tiers:
            tier.close()
