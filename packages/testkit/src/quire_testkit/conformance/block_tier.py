"""What a tier of blocks (`quire_kv_transfer.BlockTier`) must do, alone and when it fails, as tests to inherit.

class TestMyTier(BlockTierSuite):
    def make_tier(self): return MyTier(...)
    def make_stack(self, tier): return TierStack([tier], bytes(32), [BLOCK_BYTES])
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from quire_interfaces import BlockKey, QuireError
from quire_testkit.faulty_tier import Faults, FaultyTier, Tier

__all__ = ["BLOCK_BYTES", "BlockTierSuite"]

BLOCK_BYTES = 5000
NUM_FITTING = 20
"""Blocks for which the tier of `make_tier` must have room."""


def block_key(number: int, group: int = 0) -> BlockKey:
    """Key of a block."""
    return BlockKey(group, number.to_bytes(8, "big") * 4)


def content(number: int) -> bytes:
    """What block `number` holds."""
    return random.Random(number).randbytes(BLOCK_BYTES)


class BlockTierSuite:
    """A tier with room for `NUM_FITTING` blocks of `BLOCK_BYTES`, and for less than 1,000."""

    def make_tier(self) -> Tier:
        """An empty tier; closed by the suite."""
        raise NotImplementedError(f"{type(self).__name__} does not implement make_tier")

    def make_stack(self, tier: Tier) -> Any:
        """A stack of this one tier, with `read`, `write`, `contains` and `look_up`."""
        raise NotImplementedError(f"{type(self).__name__} does not implement make_stack")

    def frame_of(self, key: BlockKey, number: int) -> bytes:
        """What is stored under `key`, with the content of block `number`; a tier that checks frames overrides it."""
        return content(number)

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        tier = self.make_tier()
        yield tier
        tier.close()
        tier.close()

    def load(self, tier: Tier, key: BlockKey, num_bytes: int | None = None, cuts: Sequence[int] = ()) -> bytes | None:
        """A frame, read into pieces that end at `cuts`."""
        num_bytes = len(self.frame_of(key, 0)) if num_bytes is None else num_bytes
        whole = memoryview(bytearray(num_bytes))
        ends = [*cuts, num_bytes]
        buffers = [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        return bytes(whole) if tier.load(key, buffers) else None

    def test_what_was_stored_is_loaded(self, tier: Tier) -> None:
        for number in range(NUM_FITTING):
            frame = self.frame_of(block_key(number), number)
            assert tier.store(block_key(number), [frame[:128], memoryview(frame)[128:]])
        for number in range(NUM_FITTING):
            tier.expect(block_key(number))
            assert tier.has(block_key(number))
            assert self.load(tier, block_key(number), cuts=(128, 128, 3000)) == self.frame_of(block_key(number), number)

    def test_what_is_not_there(self, tier: Tier) -> None:
        assert tier.store(block_key(1), [self.frame_of(block_key(1), 1)])
        for other in (block_key(2), block_key(1, group=1)):
            tier.look_up([other])
            assert not tier.has(other)
            assert self.load(tier, other) is None
            tier.discard(other)
        assert self.load(tier, block_key(1)) == self.frame_of(block_key(1), 1)

    def test_what_is_discarded_is_gone(self, tier: Tier) -> None:
        tier.store(block_key(1), [self.frame_of(block_key(1), 1)])
        tier.discard(block_key(1))
        assert not tier.has(block_key(1))
        assert self.load(tier, block_key(1)) is None
        assert tier.store(block_key(1), [self.frame_of(block_key(1), 2)])
        assert self.load(tier, block_key(1)) == self.frame_of(block_key(1), 2)

    def test_another_length_is_never_loaded(self, tier: Tier) -> None:
        tier.store(block_key(1), [self.frame_of(block_key(1), 1)])
        num_bytes = len(self.frame_of(block_key(1), 1))
        for length in (num_bytes - 1, num_bytes + 1):
            with contextlib.suppress(QuireError):
                assert self.load(tier, block_key(1), length) is None

    def test_the_bound_holds(self, tier: Tier) -> None:
        for number in range(1000):
            tier.store(block_key(number), [self.frame_of(block_key(number), number)])
        assert self.load(tier, block_key(0)) is None
        assert self.load(tier, block_key(999)) == self.frame_of(block_key(999), 999)

    def test_two_threads(self, tier: Tier) -> None:
        wrong = []

        def work(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(100):
                number = rng.randrange(NUM_FITTING)
                if rng.random() < 0.5:
                    tier.store(block_key(number), [self.frame_of(block_key(number), number)])
                elif self.load(tier, block_key(number)) not in (
                    None,
                    self.frame_of(block_key(number), number),
                ):
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == []

    def read(self, stack: Any, number: int) -> bytes | None:
        """A block through a stack, which checks it."""
        data = bytearray(BLOCK_BYTES)
        return bytes(data) if stack.read(block_key(number), [memoryview(data)]) else None

    def test_what_is_damaged_is_never_served(self, tier: Tier) -> None:
        faults = Faults(1, loss=0.2, corruption=0.3)
        stack = self.make_stack(FaultyTier(tier, faults))
        for round_number in range(10):
            for number in range(NUM_FITTING // 2):
                stack.write(block_key(number), content(number))
            for number in range(NUM_FITTING // 2):
                assert self.read(stack, number) in (None, content(number)), round_number
        assert faults.num_lost > 5
        assert faults.num_corrupted > 5

    def test_a_delay_is_only_a_delay(self, tier: Tier) -> None:
        stack = self.make_stack(FaultyTier(tier, Faults(delay_s=0.01)))
        assert stack.write(block_key(1), content(1))
        assert self.read(stack, 1) == content(1)

    def test_a_dead_tier_is_left_out(self, tier: Tier) -> None:
        faults = Faults()
        stack = self.make_stack(FaultyTier(tier, faults))
        stack.write(block_key(1), content(1))
        faults.is_dead = True
        assert self.read(stack, 1) is None
        assert not stack.write(block_key(2), content(2))
        stack.look_up([block_key(3)])
        assert not stack.contains(block_key(1))
        assert stack.is_stopped
