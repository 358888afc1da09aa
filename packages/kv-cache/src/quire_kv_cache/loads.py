"""Blocks that are being filled from a tier outside: which to fill, and who holds them meanwhile.

A load holds its blocks itself. They are findable when it is over, not before, and the request that asked for them then
finds them like anything else in the prefix cache; so it may be aborted while they come, and several may want them.

Knows the pool and the groups' rules; knows no tier beyond the question whether it has a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from quire_interfaces import BlockKey, BlockTransfer, LoadablePrefix, Request
from quire_kv_cache.block_pool import BlockPool
from quire_kv_cache.coordinator import shared_prefix_blocks
from quire_kv_cache.errors import AllocatorMisuseError
from quire_kv_cache.groups import GroupPolicy

__all__ = ["BlockLoads", "Load"]


@dataclass(slots=True)
class Load:
    """One load on its way."""

    request: Request
    """For its tokens and keys; it may have ended."""
    places: tuple[tuple[int, int], ...]
    """(group, block of the request) of each target."""
    targets: list[int]
    """Block ids, as `places`."""
    pinned: list[int] = field(default_factory=list)
    """Ids of blocks of the same prefix that were in memory; referenced so that the load does not evict its own
    beginning."""
    held: list[int] = field(default_factory=list)
    """Ids of blocks that somebody outside reads, until the job ends."""


class _InMemoryOrTier:
    """The prefix index of one group, with a tier behind it; answers `in`, which is all a group's rule asks."""

    __slots__ = ("_blocks", "_contains", "_group")

    def __init__(self, blocks: dict[bytes, int], contains: Callable[[BlockKey], bool], group: int) -> None:
        self._blocks = blocks
        self._contains = contains
        self._group = group

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._blocks or self._contains(BlockKey(self._group, block_hash))  # type: ignore[arg-type]


class BlockLoads:
    """All loads of one cache.

    Args:
        pool: Gives and takes the blocks.
        policies: Rules of each group.
        block_size: Tokens in a block.
    """

    def __init__(self, pool: BlockPool, policies: Sequence[GroupPolicy], block_size: int) -> None:
        self._pool = pool
        self._policies = policies
        self._block_size = block_size
        self._loads: dict[int, Load] = {}

    def __iter__(self) -> Iterator[Load]:
        return iter(self._loads.values())

    def find(
        self, request: Request, num_cached_blocks: int, max_blocks: int, contains: Callable[[BlockKey], bool]
    ) -> LoadablePrefix:
        """Longest prefix, of at most `max_blocks` blocks, of which each block is in memory or in the tier."""
        num_blocks = num_cached_blocks
        if num_cached_blocks < max_blocks:
            indexes = [
                _InMemoryOrTier(index.blocks, contains, group)
                for group, index in enumerate(self._pool.indexes[: len(self._policies)])
            ]
            num_blocks = shared_prefix_blocks(self._policies, indexes, request.block_hashes, max_blocks)
        if num_blocks <= num_cached_blocks:
            return LoadablePrefix(num_cached_blocks * self._block_size, (), 0)
        missing, pinned = self._split(request, num_blocks)
        num_wanted = len(missing) + self._pool.num_unreferenced(pinned)
        return LoadablePrefix(num_blocks * self._block_size, missing, num_wanted)

    def _split(self, request: Request, num_blocks: int) -> tuple[tuple[tuple[int, int], ...], list[int]]:
        """What of a prefix is not in memory, as (group, block), and the block ids of what is; in token order."""
        hashes = request.block_hashes
        firsts = [policy.first_read_block(num_blocks * self._block_size) for policy in self._policies]
        missing: list[tuple[int, int]] = []
        pinned: list[int] = []
        for block in range(min(firsts), num_blocks):
            for group, index in enumerate(self._pool.indexes[: len(self._policies)]):
                if block < firsts[group]:
                    continue
                block_id = index.blocks.get(hashes[block])
                if block_id is None:
                    missing.append((group, block))
                else:
                    pinned.append(block_id)
        return tuple(missing), pinned

    def begin(self, job_id: int, request: Request, prefix: LoadablePrefix) -> tuple[BlockTransfer, ...] | None:
        """Take the blocks of `prefix` that are in memory, and fresh ones for the missing; None when too few are free.

        Raises:
            AllocatorMisuseError: the prefix is stale, has nothing to load, or the job id is in use.
        """
        if job_id in self._loads or not prefix.missing:
            what = "is under way already" if job_id in self._loads else "has no blocks"
            raise AllocatorMisuseError(f"load {job_id} {what}; use a new number, and load only what is missing")
        missing, pinned = self._split(request, prefix.num_tokens // self._block_size)
        if missing != prefix.missing:
            raise AllocatorMisuseError(
                f"the loadable prefix of request {request.request_id!r} is stale; call find_loadable_prefix again"
            )
        pool = self._pool
        if len(missing) + pool.num_unreferenced(pinned) > pool.num_free:
            return None
        pool.touch(pinned)
        targets = pool.take(len(missing))
        self._loads[job_id] = Load(request, missing, targets, pinned)
        hashes = request.block_hashes
        return tuple(
            [
                BlockTransfer(BlockKey(group, hashes[block]), target)
                for (group, block), target in zip(missing, targets, strict=True)
            ]
        )

    def hold(self, job_id: int, request: Request, num_blocks: int) -> tuple[BlockTransfer, ...]:
        """Reference the cached blocks among the first `num_blocks` of a request that what follows them reads.

        Raises:
            AllocatorMisuseError: the job id is in use.
        """
        if job_id in self._loads:
            raise AllocatorMisuseError(f"job {job_id} is under way already; use a new number")
        firsts = [policy.first_read_block(num_blocks * self._block_size) for policy in self._policies]
        held = [
            BlockTransfer(BlockKey(group, request.block_hashes[block]), block_id)
            for block in range(num_blocks)
            for group, index in enumerate(self._pool.indexes[: len(self._policies)])
            if block >= firsts[group] and (block_id := index.blocks.get(request.block_hashes[block])) is not None
        ]
        if held:
            block_ids = [block.block_id for block in held]
            self._pool.touch(block_ids)
            self._loads[job_id] = Load(request, (), [], held=block_ids)
        return tuple(held)

    def end(self, job_id: int, arrived: Sequence[bool]) -> tuple[Load, list[tuple[int, int]]]:
        """Make findable what arrived, and let go of everything.

        Returns:
            The load, and the (group, block) whose content was not findable before.

        Raises:
            AllocatorMisuseError: there is no such load, or `arrived` has not one element per block.
        """
        load = self._loads.get(job_id)
        if load is None or len(arrived) != len(load.targets):
            raise AllocatorMisuseError(f"load {job_id} is not under way with {len(arrived)} blocks; end each load once")
        del self._loads[job_id]
        stored: list[tuple[int, int]] = []
        for (group, block), target, is_there in zip(load.places, load.targets, arrived, strict=True):
            if is_there and self._pool.store(target, load.request.block_hashes[block], group):
                stored.append((group, block))
        self._pool.release(reversed(load.targets))
        self._pool.release(reversed([*load.pinned, *load.held]))
        return load, stored

    def unpin(self) -> None:
        """Let go of the blocks that are only referenced for their content: it is about to be forgotten."""
        for load in self._loads.values():
            self._pool.release(reversed(load.pinned))
            load.pinned = []

    def block_ids(self) -> Iterable[int]:
        """Every block a load holds, once per reference."""
        for load in self._loads.values():
            yield from load.targets
            yield from load.pinned
            yield from load.held
