"""Tiers and connectors of an engine of several ranks: each rank stores and loads its own part of every block.

The parts are kept under keys that have the rank and the layout in them, so that a part of another width is never found.
Rank 0 decides what is loaded and stored; every rank does it with the same step, and rank 0 makes one report of what
became of it. Importing this module loads no torch.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from quire.parallel.config import ParallelConfig
from quire_interfaces import KVTransferOutput, SchedulerOutput
from quire_kv_transfer import RankReports, TierStack, model_fingerprint

if TYPE_CHECKING:
    from quire_distributed import Collectives
    from quire_distributed.rank_handle import MergeTransfers

__all__ = ["RanksExecutor", "TierRank", "merge_by", "shared_digest"]

_DIGEST_BYTES = 64


class RanksExecutor(Protocol):
    """What runs steps on all ranks."""

    merge_transfers: MergeTransfers | None

    def call(self, name: str, *arguments: Any) -> None:
        """Have the other ranks do something between two steps."""


class TierRank(NamedTuple):
    """A rank, as its tiers see it."""

    world: Collectives
    """All ranks of the engine."""
    parallel: ParallelConfig

    @property
    def is_first(self) -> bool:
        """Whether it is the one that decides."""
        return self.world.rank == 0

    def fingerprint(self, of_all: bytes) -> bytes:
        """32 bytes that depend on the rank and on how the model is shared, beside what they depend on anyway."""
        parallel = self.parallel
        return model_fingerprint(
            {
                "part of": of_all.hex(),
                "rank": self.world.rank,
                "tensor_parallel_size": parallel.tensor_parallel_size,
                "pipeline_parallel_size": parallel.pipeline_parallel_size,
                "decode_context_parallel_size": parallel.decode_context_parallel_size,
            }
        )

    def gather(self, number: int) -> list[int]:
        """A number of each rank; all ranks call this."""
        import torch

        numbers: list[int] = self.world.all_gather(torch.tensor([number]), dim=0).tolist()
        return numbers


def shared_digest(digest: Future[str] | None, world: Collectives | None) -> str:
    """The digest of the checkpoint, which the first of several ranks alone reads whole. All ranks call this.

    Args:
        digest: On the first rank; None elsewhere.
        world: All ranks; None for one.
    """
    own = "" if digest is None else digest.result()
    if world is None:
        return own
    import torch

    data = torch.frombuffer(bytearray(own.encode().ljust(_DIGEST_BYTES)), dtype=torch.uint8)
    return bytes(world.broadcast(data).numpy()).decode()


def merge_by(stack: TierStack | None) -> MergeTransfers:
    """What makes one report of those of all ranks.

    Args:
        stack: Rank 0's; None where there is only a connector.
    """
    reports = RankReports((lambda key: None) if stack is None else stack.discard)

    def merge(output: SchedulerOutput, each: list[KVTransferOutput | None]) -> KVTransferOutput | None:
        return reports.merged(output.kv_transfer, each)

    return merge
