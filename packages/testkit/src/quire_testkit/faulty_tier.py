"""A tier that does what tiers do on bad days: it is slow, loses, damages, and dies, in a reproducible order."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Protocol

from quire_interfaces import BlockKey

__all__ = ["Faults", "FaultyTier", "Tier"]


class Tier(Protocol):
    """What `quire_kv_transfer.BlockTier` asks of a tier."""

    @property
    def name(self) -> str:
        """What it is called in logs."""

    def has(self, key: BlockKey) -> bool:
        """Whether the frame is there, as far as is known."""

    def look_up(self, keys: Sequence[BlockKey]) -> None:
        """Find out which of these are there."""

    def expect(self, key: BlockKey) -> None:
        """The frame will be loaded soon."""

    def load(self, key: BlockKey, buffers: Sequence[memoryview]) -> bool:
        """Copy a frame into place; whether it was there."""

    def store(self, key: BlockKey, buffers: Sequence[bytes | memoryview]) -> bool:
        """Keep a frame; whether it was taken."""

    def discard(self, key: BlockKey) -> None:
        """Drop a frame."""

    def close(self) -> None:
        """Let go of everything."""


class Faults:
    """How often which fault happens. May be changed while the tier is in use.

    Args:
        seed: Of the choice.
        loss: Share of loads that bring nothing although the tier has the frame.
        corruption: Share of loads in which one bit is wrong.
        delay_s: Seconds that every load and store takes longer.
    """

    def __init__(self, seed: int = 0, *, loss: float = 0.0, corruption: float = 0.0, delay_s: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.loss = loss
        self.corruption = corruption
        self.delay_s = delay_s
        self.is_dead = False
        """Everything but `has` raises ConnectionError."""
        self.num_lost = 0
        self.num_corrupted = 0


class FaultyTier:
    """A tier between a stack and another tier, with faults.

    Args:
        tier: What it passes on to.
        faults: What goes wrong.
    """

    def __init__(self, tier: Tier, faults: Faults) -> None:
        self._tier = tier
        self.faults = faults
        self.name = f"faulty {tier.name}"

    def has(self, key: BlockKey) -> bool:
        """What the tier says."""
        return self._tier.has(key)

    def look_up(self, keys: Sequence[BlockKey]) -> None:
        """What the tier does."""
        self._live()
        self._tier.look_up(keys)

    def expect(self, key: BlockKey) -> None:
        """What the tier does."""
        self._live()
        self._tier.expect(key)

    def load(self, key: BlockKey, buffers: Sequence[memoryview]) -> bool:
        """Load with delay, loss and wrong bits."""
        self._live()
        time.sleep(self.faults.delay_s)
        if not self._tier.load(key, buffers):
            return False
        rng = self.faults.rng
        if rng.random() < self.faults.loss:
            self.faults.num_lost += 1
            return False
        if rng.random() < self.faults.corruption:
            self.faults.num_corrupted += 1
            buffer = rng.choice([buffer for buffer in buffers if len(buffer)])
            buffer[rng.randrange(len(buffer))] ^= 1 << rng.randrange(8)
        return True

    def store(self, key: BlockKey, buffers: Sequence[bytes | memoryview]) -> bool:
        """Store with delay."""
        self._live()
        time.sleep(self.faults.delay_s)
        return self._tier.store(key, buffers)

    def discard(self, key: BlockKey) -> None:
        """What the tier does."""
        self._live()
        self._tier.discard(key)

    def close(self) -> None:
        """What the tier does."""
        self._tier.close()

    def _live(self) -> None:
        if self.faults.is_dead:
            raise ConnectionError("the tier is dead")
