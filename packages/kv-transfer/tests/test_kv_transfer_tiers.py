"""Tiers alone and in a stack: conformance of each, order, promotion, other models' blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from quire_interfaces import BlockTransfer, KVTransferJob, KVTransferPlan
from quire_kv_transfer import BlockFiles, BlockTier, FolderUsage, HostMemoryTier, TierFolder, TierStack
from quire_testkit.conformance.block_tier import BLOCK_BYTES, BlockTierSuite, block_key, content
from quire_testkit.conformance.kv_transfer import LayeredMemory
from quire_testkit.faulty_tier import Faults, FaultyTier

FINGERPRINT = b"m" * 32


def make_stack(*tiers: BlockTier, fingerprint: bytes = FINGERPRINT) -> TierStack:
    return TierStack(tiers, fingerprint, [BLOCK_BYTES])


def read(stack: TierStack, number: int) -> bytes | None:
    data = bytearray(BLOCK_BYTES)
    return bytes(data) if stack.read(block_key(number), [memoryview(data)]) else None


class TestHostMemoryTier(BlockTierSuite):
    def make_tier(self) -> HostMemoryTier:
        return HostMemoryTier(30 * BLOCK_BYTES)

    def make_stack(self, tier: BlockTier) -> TierStack:
        return make_stack(tier)


class TestBlockFiles(BlockTierSuite):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = str(tmp_path)

    def make_tier(self) -> BlockFiles:
        return BlockFiles(TierFolder(self.path, FINGERPRINT), FolderUsage(self.path, 30 * 8192))

    def make_stack(self, tier: BlockTier) -> TierStack:
        return make_stack(tier)


def test_host_memory_counts_what_it_holds() -> None:
    tier = HostMemoryTier(100)
    assert tier.store(block_key(1), [b"x" * 60])
    assert not tier.store(block_key(2), [b"x" * 101]), "too large, and nothing is lost for it"
    assert (tier.used_bytes, len(tier)) == (60, 1)
    assert tier.store(block_key(1), [b"y" * 40])
    assert tier.store(block_key(2), [b"x" * 60])
    assert (tier.used_bytes, len(tier)) == (100, 2)
    tier.load(block_key(1), [memoryview(bytearray(40))])
    assert tier.store(block_key(3), [b"z" * 50])
    assert tier.has(block_key(1)), "used last"
    assert not tier.has(block_key(2))
    assert tier.used_bytes == 90
    tier.close()
    assert (tier.used_bytes, len(tier)) == (0, 0)


def test_blocks_are_written_to_all_tiers_and_read_from_the_first() -> None:
    upper, lower = HostMemoryTier(1 << 20), HostMemoryTier(1 << 20)
    stack = make_stack(upper, lower)
    assert stack.write(block_key(1), content(1))
    assert upper.has(block_key(1))
    assert lower.has(block_key(1))
    assert stack.is_kept(block_key(1))
    lower.close()
    assert read(stack, 1) == content(1)
    assert not stack.is_kept(block_key(1))


def test_what_a_lower_tier_gives_is_kept_above_it() -> None:
    upper, lower = HostMemoryTier(1 << 20), HostMemoryTier(1 << 20)
    stack = make_stack(upper, lower)
    stack.write(block_key(1), content(1))
    upper.close()
    assert stack.contains(block_key(1))
    assert read(stack, 1) == content(1)
    lower.close()
    assert read(stack, 1) == content(1)


def test_a_damaged_block_above_is_read_from_below() -> None:
    upper, lower = HostMemoryTier(1 << 20), HostMemoryTier(1 << 20)
    stack = make_stack(FaultyTier(upper, Faults(corruption=1.0)), lower)
    stack.write(block_key(1), content(1))
    assert read(stack, 1) == content(1)


@pytest.mark.parametrize("fingerprint", [b"n" * 32, b"m" * 31 + b"n"])
def test_a_block_of_another_model_is_never_served(fingerprint: bytes) -> None:
    tier = HostMemoryTier(1 << 20)
    make_stack(tier, fingerprint=fingerprint).write(block_key(1), content(1))
    assert read(make_stack(tier), 1) is None
    assert not tier.has(block_key(1)), "nobody else here reads it"


def test_a_block_under_another_ones_key_is_never_served() -> None:
    tier = HostMemoryTier(1 << 20)
    stack = make_stack(tier)
    stack.write(block_key(1), content(1))
    frame = tier.frame(block_key(1))
    assert frame is not None
    tier.keep(block_key(2), bytearray(frame))
    tier.keep(block_key(1, group=1), bytearray(frame))
    assert read(stack, 2) is None
    assert not stack.read(block_key(1, group=1), [memoryview(bytearray(BLOCK_BYTES))])
    assert read(stack, 1) == content(1)


def test_one_broken_tier_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults()
    stack = make_stack(FaultyTier(HostMemoryTier(1 << 20), faults), HostMemoryTier(1 << 20))
    stack.write(block_key(1), content(1))
    faults.is_dead = True
    assert read(stack, 1) == content(1)
    assert read(stack, 1) == content(1)
    assert not stack.is_stopped
    assert [record.message for record in caplog.records] == [
        "the faulty host memory tier is switched off until the next start (ConnectionError: the tier is dead); make "
        "room or repair it. Requests go on without it"
    ]


class FullDevice(LayeredMemory):
    """Has no memory for a copy of block 3."""

    def snapshot(self, places: Sequence[tuple[int, int]]) -> Callable[[], list[bytes]]:
        if (0, 3) in places:
            raise MemoryError("no memory left on the device")
        return super().snapshot(places)


def test_a_copy_that_cannot_begin_fails_its_stores_alone(caplog: pytest.LogCaptureFixture) -> None:
    worker = make_stack(HostMemoryTier(30 * BLOCK_BYTES)).make_worker(FullDevice(8))
    jobs = [KVTransferJob(number, (BlockTransfer(block_key(number), number),)) for number in (2, 3, 4)]
    worker.begin(KVTransferPlan(stores=jobs))
    finished: dict[int, list[bool]] = {}
    deadline_s = time.monotonic() + 20
    while len(finished) < len(jobs) and time.monotonic() < deadline_s:
        output = worker.poll(waits=True)
        finished |= {} if output is None else output.finished
    worker.close()
    assert finished == {2: [True], 3: [False], 4: [True]}
    assert "no memory left on the device" in caplog.text
