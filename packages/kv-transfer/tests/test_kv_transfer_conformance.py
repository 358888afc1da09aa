"""The disk tier keeps the contract of both halves, and so does the plain tier that tests use in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire_interfaces import BlockMemory, KVConnector, KVTransferWorker
from quire_kv_transfer import DiskTier, model_fingerprint
from quire_testkit.conformance.kv_transfer import KVTransferSuite
from quire_testkit.memory_tier import MemoryConnector, MemoryTier, MemoryWorker


class TestDiskTier(KVTransferSuite):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "tier"

    def make_tier(self, memory: BlockMemory, block_bytes: tuple[int, ...]) -> tuple[KVConnector, KVTransferWorker]:
        tier = DiskTier(str(self.path), model_fingerprint({"model": "a"}), block_bytes, size_bytes=100 << 20)
        return tier.connector, tier.make_worker(memory)


class TestMemoryTier(KVTransferSuite):
    """The suite must not be a description of one implementation."""

    def make_tier(self, memory: BlockMemory, block_bytes: tuple[int, ...]) -> tuple[KVConnector, KVTransferWorker]:
        tier = MemoryTier()
        return MemoryConnector(tier), MemoryWorker(tier, memory)
