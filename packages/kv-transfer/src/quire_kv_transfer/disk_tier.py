"""The disk tier as a whole: opened once per engine; its files are one tier of a stack."""

from __future__ import annotations

from collections.abc import Sequence

from quire_interfaces import BlockMemory, KVCachePlan
from quire_kv_transfer.block_files import BlockFiles
from quire_kv_transfer.encoder_cache import DiskEncoderCache
from quire_kv_transfer.folder import TierFolder
from quire_kv_transfer.tier_stack import TierStack
from quire_kv_transfer.tier_worker import TierWorker
from quire_kv_transfer.usage import open_usage

__all__ = ["DiskTier", "group_block_bytes"]


def group_block_bytes(plan: KVCachePlan) -> tuple[int, ...]:
    """Bytes of one block of each group: all of its layers."""
    return tuple(group.spec.block_bytes * len(group.layer_names) for group in plan.groups)


class DiskTier:
    """A folder that keeps prefix blocks.

    Args:
        path: The folder; made if it is not there.
        fingerprint: 32 bytes from `model_fingerprint`.
        block_bytes: Bytes of a block, per KV cache group.
        size_bytes: Bound of all files in it; None takes half of what is free there, together with what they take now.
        max_wanted: Most blocks remembered as still to be stored; the blocks of the KV cache are a good bound.

    Raises:
        ConfigError: the folder cannot be written to, or is too small.
    """

    def __init__(
        self,
        path: str,
        fingerprint: bytes,
        block_bytes: Sequence[int],
        *,
        size_bytes: int | None = None,
        max_wanted: int = 100_000,
    ) -> None:
        self._usage = open_usage(path, size_bytes, max(block_bytes))
        self._folder = TierFolder(self._usage.root, fingerprint)
        self.size_bytes = self._usage.bound_bytes
        """Bound of all files in the folder."""
        self.files = BlockFiles(self._folder, self._usage)
        """The folder as a tier of a larger stack."""
        self._stack = TierStack([self.files], fingerprint, block_bytes, max_wanted=max_wanted)
        self.connector = self._stack.connector
        """The scheduler's half of this tier alone."""

    @property
    def root(self) -> str:
        """The folder, as an absolute path."""
        return self._folder.root

    @property
    def used_bytes(self) -> int:
        """What the files take now, as far as is known."""
        return self._usage.total_bytes

    def make_worker(self, memory: BlockMemory) -> TierWorker:
        """The runner's half of this tier alone. It has threads: close it."""
        return self._stack.make_worker(memory)

    def make_encoder_cache(self, fingerprint: bytes, *, dtype: str, width: int) -> DiskEncoderCache:
        """The files of encoder outputs, within the same bound. It may have a thread: close it.

        Args:
            fingerprint: 32 bytes from `model_fingerprint`, of the towers.
            dtype: Of the embeddings.
            width: Numbers of one embedding.
        """
        return DiskEncoderCache(TierFolder(self.root, fingerprint), self._usage, dtype=dtype, width=width)
