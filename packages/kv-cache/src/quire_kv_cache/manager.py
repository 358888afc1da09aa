"""The KV cache as the scheduler sees it: block tables of requests, shared prefixes, eviction.

Knows token ids only to hash them, and blocks only as integers; it knows no tensors and no device. Not thread-safe: one
owner, the scheduler's loop, makes all calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire_interfaces import (
    NULL_BLOCK_ID,
    BlockKey,
    BlockTransfer,
    CachedPrefix,
    ConfigError,
    CrossAttentionSpec,
    KVCacheEvent,
    KVCachePlan,
    KVCacheUsage,
    LoadablePrefix,
    PrefixCacheMiss,
    Request,
)
from quire_kv_cache.block_pool import BlockPool
from quire_kv_cache.config import KVCacheConfig
from quire_kv_cache.coordinator import prefix_block_ids, shared_prefix_blocks
from quire_kv_cache.encoder_blocks import EncoderBlocks
from quire_kv_cache.errors import AllocatorMisuseError
from quire_kv_cache.events import EventLog
from quire_kv_cache.groups import NEVER, make_group_policy
from quire_kv_cache.hashing import BlockHasher, block_extra_keys
from quire_kv_cache.integrity import check_integrity
from quire_kv_cache.loads import BlockLoads
from quire_kv_cache.miss import PrefixHistory, explain_miss
from quire_kv_cache.request_blocks import RequestBlocks

__all__ = ["KVCacheManager", "PrefixCacheStats"]


class PrefixCacheStats(NamedTuple):
    """Counters since the start; they only grow. Requests that re-enter after preemption are not counted again: their
    hits are on their own blocks and would flatter the rate."""

    num_requests: int
    """Requests that were looked up and then allocated for."""
    num_query_tokens: int
    """Their known tokens."""
    num_hit_tokens: int
    """Those of them that were found."""
    num_evicted_hashes: int
    """Block contents that stopped being findable because their block was needed."""


class KVCacheManager:
    """The paged KV cache's bookkeeping; implements `quire_interfaces.TieredBlockAllocator`.

    Block allocation follows PagedAttention (Kwon et al. 2023, arXiv:2309.06180, section 4); blocks are shared by
    content hash and evicted least recently used first.

    Args:
        plan: Groups and number of blocks, as from `plan_kv_cache`.
        config: Settings; `config.block_size` must be the plan's.
        on_computed: Called with (group, hashes) when computed blocks become findable whose content was not before, for
            tiers that want to keep them. Blocks that a tier brought are not reported.

    Raises:
        ConfigError: plan and config disagree, or a group is of an unknown kind.
    """

    def __init__(
        self,
        plan: KVCachePlan,
        config: KVCacheConfig | None = None,
        *,
        on_computed: Callable[[int, list[bytes]], None] | None = None,
    ) -> None:
        config = config or KVCacheConfig()
        for group in plan.groups:
            if group.spec.block_size != config.block_size:
                raise ConfigError(
                    f"block_size is {config.block_size}, but the plan was made for {group.spec.block_size}: "
                    "make plan and cache from the same settings",
                    field="block_size",
                )
        if not plan.groups:
            raise ConfigError("the plan has no KV cache groups: there is nothing to allocate blocks for")
        self.config = config
        self.block_size = config.block_size
        policies = tuple(make_group_policy(group.spec) for group in plan.groups)
        is_cross = [isinstance(group.spec, CrossAttentionSpec) for group in plan.groups]
        num_own = is_cross.index(True) if any(is_cross) else len(is_cross)
        if num_own == 0 or not all(is_cross[num_own:]):
            raise ConfigError("the plan must have groups of the tokens themselves first, those of cross attention last")
        self._policies = policies[:num_own]
        """Of the groups whose blocks hold the request's tokens; those of cross attention are apart."""
        self._num_encoder_blocks = sum(policy.max_blocks(0, 1) for policy in policies[num_own:])
        self._has_states = any(policy.keeps_states for policy in self._policies)
        self._none_empty = [0] * len(self._policies)
        self._keeps_until_findable = self._has_states and config.enable_prefix_caching
        self._pool = BlockPool(plan.num_blocks, len(plan.groups), self._on_evict)
        self._hasher = BlockHasher(config.prefix_caching_hash_algo, config.block_size)
        self._encoder = EncoderBlocks(self._pool, self._hasher, range(num_own, len(policies)))
        self._requests: dict[str, RequestBlocks] = {}
        self._loads = BlockLoads(self._pool, self._policies, config.block_size)
        self._on_computed = on_computed
        self._events = EventLog(config.kv_cache_event_buffer_size) if config.enable_kv_cache_events else None
        self._history = PrefixHistory(max(plan.num_blocks, 1024))
        self._stats = PrefixCacheStats(0, 0, 0, 0)

    @property
    def num_groups(self) -> int:
        return len(self._policies) + len(self._encoder.groups)

    @property
    def prefix_cache_stats(self) -> PrefixCacheStats:
        return self._stats

    def find_cached_prefix(self, request: Request) -> CachedPrefix:
        """Longest cached prefix of the request's known tokens, with its encoder input if that is cached. With prefix
        caching off nothing is hashed or found.

        Raises:
            RequestError: a token id is not an integer from 0 to 2**32 - 1.
        """
        num_blocks = self._num_hit_blocks(request)
        indexes = self._pool.indexes[: len(self._policies)]
        tables = prefix_block_ids(self._policies, indexes, request.block_hashes, num_blocks, self.block_size)
        if not self._encoder.groups:
            return CachedPrefix(num_blocks * self.block_size, tables)
        encoder = self._encoder.find(request) if self.config.enable_prefix_caching else self._encoder.nothing()
        return CachedPrefix(num_blocks * self.block_size, tables + encoder, any(encoder))

    def _num_hit_blocks(self, request: Request) -> int:
        if not self.config.enable_prefix_caching:
            return 0
        self._hasher.extend(request)
        if not request.reads_prefix_cache:
            return 0
        indexes = [index.blocks for index in self._pool.indexes]
        return shared_prefix_blocks(self._policies, indexes, request.block_hashes, self._max_hit_blocks(request))

    def _max_hit_blocks(self, request: Request) -> int:
        """Whole blocks before the last token, which must be computed."""
        return max(request.num_tokens - 1, 0) // self.block_size

    def find_loadable_prefix(
        self, request: Request, cached: CachedPrefix, contains: Callable[[BlockKey], bool]
    ) -> LoadablePrefix:
        """Longest prefix of which each block is in memory or, by `contains`, in a tier. Changes nothing."""
        is_readable = self.config.enable_prefix_caching and request.reads_prefix_cache
        max_blocks = self._max_hit_blocks(request) if is_readable else 0
        return self._loads.find(request, cached.num_tokens // self.block_size, max_blocks, contains)

    def begin_load(self, job_id: int, request: Request, prefix: LoadablePrefix) -> tuple[BlockTransfer, ...] | None:
        """Take the blocks of `prefix` that are in memory, and fresh ones for the missing; None when too few are free.

        Raises:
            AllocatorMisuseError: the prefix is stale, has nothing to load, or the job id is in use.
        """
        return self._loads.begin(job_id, request, prefix)

    def end_load(self, job_id: int, arrived: Sequence[bool]) -> None:
        """Make findable what a load brought, and let go of its blocks.

        Raises:
            AllocatorMisuseError: there is no such load, or `arrived` has not one element per block.
        """
        load, stored = self._loads.end(job_id, arrived)
        for group in range(len(self._policies)):
            self._record_runs(load.request, group, [block for place, block in stored if place == group])

    def hold_prefix(self, job_id: int, request: Request) -> tuple[BlockTransfer, ...]:
        """Keep the cached blocks of a request from being written until `end_load(job_id, [])`; none hold nothing.

        Raises:
            AllocatorMisuseError: the job id is in use.
        """
        return self._loads.hold(job_id, request, self._num_hit_blocks(request))

    def cached_block_id(self, key: BlockKey) -> int | None:
        """Block that holds this content now, None when it is not in memory."""
        return self._pool.indexes[key.group].blocks.get(key.block_hash)

    def allocate(
        self, request: Request, num_new_tokens: int, cached: CachedPrefix | None = None, num_lookahead_tokens: int = 0
    ) -> tuple[list[int], ...] | None:
        """Give the request slots for new tokens and tokens drafted on the device; None when too few blocks are free.

        Blocks that no token from `request.num_computed_tokens` on reads are given back first (sliding windows), which
        is sound with steps in flight because steps run in order.

        Raises:
            AllocatorMisuseError: a negative count, or a `cached` that is stale or not for a first allocation.
        """
        holding = self._requests.get(request.request_id)
        if holding is None:
            return self._allocate_first(request, num_new_tokens, cached, num_lookahead_tokens)
        start = request.num_computed_tokens
        num_slots = start + num_new_tokens + num_lookahead_tokens
        if cached is None and num_slots <= holding.num_slots and start < holding.release_at:
            return tuple([[] for _ in range(self.num_groups)])
        _check_counts(num_new_tokens, num_lookahead_tokens)
        if start < holding.release_at and not self._has_states and cached is None:
            # What decodes ask for: further blocks, and none to let go.
            num_new_blocks = -(-(num_slots - holding.num_slots) // self.block_size)
            if num_new_blocks * len(self._policies) > self._pool.num_free:
                return None
            new_block_ids = self._append(holding, num_new_blocks, self._none_empty)
            return new_block_ids + self._encoder.nothing() if self._encoder.groups else new_block_ids
        if cached is not None and cached.num_tokens:
            raise AllocatorMisuseError(f"request {request.request_id!r} already holds blocks: it cannot take a prefix")
        return self._grow(request, holding, start + num_new_tokens, num_slots)

    def _allocate_first(
        self, request: Request, num_new_tokens: int, cached: CachedPrefix | None, num_lookahead_tokens: int
    ) -> tuple[list[int], ...] | None:
        _check_counts(num_new_tokens, num_lookahead_tokens)
        size, pool = self.block_size, self._pool
        if cached is None:
            cached = CachedPrefix(0, tuple([[] for _ in range(self.num_groups)]))
        num_hit_blocks = cached.num_tokens // size
        if num_hit_blocks or cached.has_encoder:
            self._check_fresh(request, cached)
        start = cached.num_tokens if num_hit_blocks else request.num_computed_tokens
        end = start + num_new_tokens
        num_blocks = max(-(-(end + num_lookahead_tokens) // size), num_hit_blocks)
        num_empty = self._num_empty(request, num_hit_blocks, num_blocks, end)
        num_needed = (num_blocks - num_hit_blocks) * len(self._policies) - sum(num_empty)
        if not cached.has_encoder:
            num_needed += self._encoder.num_blocks(request)
        num_revived = sum(pool.num_unreferenced(table) for table in cached.block_ids)
        if num_needed + num_revived > pool.num_free:
            return None
        for table in cached.block_ids:
            pool.touch(table)
        first_blocks = [policy.first_read_block(cached.num_tokens) for policy in self._policies]
        tables = tuple([list(table) for table in cached.block_ids])
        holding = RequestBlocks(tables[: len(self._policies)], first_blocks, num_hit_blocks * size)
        holding.num_cached_blocks = num_hit_blocks
        holding.cache_at = (num_hit_blocks + 1) * size if self.config.enable_prefix_caching else NEVER
        holding.encoder_tables = tables[len(self._policies) :]
        if not cached.has_encoder and request.encoder_token_ids:
            holding.encoder_tables = self._encoder.take(request)
            holding.cache_at = min(holding.cache_at, 1)
            holding.encoder_is_new = True
        self._append(holding, num_blocks - num_hit_blocks, num_empty)
        self._set_release_at(holding)
        self._requests[request.request_id] = holding
        self._count_query(request, cached.num_tokens)
        return tuple([list(table) for table in holding.tables + holding.encoder_tables])

    def _grow(self, request: Request, holding: RequestBlocks, end: int, num_slots: int) -> tuple[list[int], ...] | None:
        pool = self._pool
        num_held_blocks = holding.num_slots // self.block_size
        num_new_blocks = max(-(-num_slots // self.block_size) - num_held_blocks, 0)
        num_empty = self._num_empty(request, num_held_blocks, num_held_blocks + num_new_blocks, end)
        num_needed = num_new_blocks * len(self._policies) - sum(num_empty)
        # Computed tokens beyond the known ones may be drafts of a step in flight and be taken back; the position after
        # the known tokens is the earliest that the next step can begin at.
        position = min(request.num_computed_tokens, request.num_tokens)
        outdated: list[tuple[int, int, list[int]]] = []
        if position >= holding.release_at:
            outdated = self._outdated(holding, position, self._keeps_until_findable)
            if num_needed > pool.num_free + _num_released(pool, outdated):
                outdated = self._outdated(holding, position, False)
        if num_needed > pool.num_free and num_needed > pool.num_free + _num_released(pool, outdated):
            return None
        for group, first, blocks in outdated:
            pool.release(reversed(blocks))
            holding.tables[group][first : first + len(blocks)] = [NULL_BLOCK_ID] * len(blocks)
            holding.first_blocks[group] = first + len(blocks)
        if outdated:
            self._set_release_at(holding)
        return self._append(holding, num_new_blocks, num_empty) + self._encoder.nothing()

    def _num_empty(self, request: Request, first_block: int, end_block: int, end: int) -> list[int]:
        """Per group, how many of the new blocks [first_block, end_block) get nothing in a step up to position `end`.
        Beyond the known tokens there may be drafts, or room for them: the step may end anywhere there."""
        if not self._has_states:
            return self._none_empty
        end = min(end, request.num_tokens)
        return [
            min(max(policy.first_written_block(end), first_block), end_block) - first_block for policy in self._policies
        ]

    def _outdated(
        self, holding: RequestBlocks, position: int, keeps_until_findable: bool
    ) -> list[tuple[int, int, list[int]]]:
        """(group, first block, block ids) of what no token from `position` on reads."""
        outdated = []
        for group, policy in enumerate(self._policies):
            first = holding.first_blocks[group]
            end = policy.first_read_block(position)
            if keeps_until_findable and policy.keeps_states:
                # The step that fills it may be in flight: what is let go now would never be found.
                end = min(end, holding.num_cached_blocks)
            blocks = holding.tables[group][first:end]
            if blocks:
                outdated.append((group, first, blocks))
        return outdated

    def _set_release_at(self, holding: RequestBlocks) -> None:
        holding.release_at = min(
            policy.next_release(first) for policy, first in zip(self._policies, holding.first_blocks, strict=True)
        )

    def _append(self, holding: RequestBlocks, num_blocks: int, num_empty: list[int]) -> tuple[list[int], ...]:
        pool = self._pool
        holding.num_slots += num_blocks * self.block_size
        if num_empty == [0]:
            block_ids = pool.take(num_blocks)
            holding.tables[0].extend(block_ids)
            return (block_ids,)
        new_block_ids = tuple([[NULL_BLOCK_ID] * empty + pool.take(num_blocks - empty) for empty in num_empty])
        for table, block_ids in zip(holding.tables, new_block_ids, strict=True):
            table.extend(block_ids)
        return new_block_ids

    def _check_fresh(self, request: Request, cached: CachedPrefix) -> None:
        """A prefix found before the last change may name blocks that now hold other content."""
        block_hashes, block_groups = self._pool.block_hashes, self._pool.block_groups
        for group, table in enumerate(cached.block_ids[: len(self._policies)]):
            for block, expected in zip(table, request.block_hashes, strict=False):
                if block != NULL_BLOCK_ID and (block_hashes[block] != expected or block_groups[block] != group):
                    raise AllocatorMisuseError(
                        f"the cached prefix of request {request.request_id!r} is stale: block {block} holds other "
                        "content now; call find_cached_prefix again before allocate"
                    )
        if not self._encoder.is_fresh(request, cached.block_ids[len(self._policies) :]):
            raise AllocatorMisuseError(
                f"the cached encoder input of request {request.request_id!r} is stale; call find_cached_prefix again "
                "before allocate"
            )

    def _count_query(self, request: Request, num_hit_tokens: int) -> None:
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = min(num_hit_tokens, request.num_prompt_tokens)
        if self.config.enable_prefix_caching and request.reads_prefix_cache and request.num_preemptions == 0:
            stats = self._stats
            self._stats = stats._replace(
                num_requests=stats.num_requests + 1,
                num_query_tokens=stats.num_query_tokens + request.num_tokens,
                num_hit_tokens=stats.num_hit_tokens + num_hit_tokens,
            )

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> int:
        """Make whole blocks of computed, known tokens findable. No-op without blocks.

        Raises:
            AllocatorMisuseError: more tokens than are known or fit the request's blocks.
        """
        holding = self._requests.get(request.request_id)
        if holding is None:
            return NEVER
        if num_computed_tokens < holding.cache_at:
            return holding.cache_at
        if num_computed_tokens > request.num_tokens or num_computed_tokens > holding.num_slots:
            raise AllocatorMisuseError(
                f"request {request.request_id!r}: {num_computed_tokens} tokens cannot be computed, "
                f"{request.num_tokens} are known and {holding.num_slots} fit its blocks"
            )
        self._hasher.extend(request)
        start, end = holding.num_cached_blocks, num_computed_tokens // self.block_size
        if start == 0:
            self._history.remember_salt(request.options.cache_salt)
        if holding.encoder_is_new:
            holding.encoder_is_new = False
            self._encoder.store(request, holding.encoder_tables, self._events)
        for group, (table, first) in enumerate(zip(holding.tables, holding.first_blocks, strict=True)):
            self._store(request, group, table, start if start > first else first, end)
        holding.num_cached_blocks = end
        holding.cache_at = (end + 1) * self.block_size
        return holding.cache_at

    def _store(self, request: Request, group: int, table: list[int], start: int, end: int) -> None:
        pool, hashes = self._pool, request.block_hashes
        stored = [i for i in range(start, end) if table[i] != NULL_BLOCK_ID and pool.store(table[i], hashes[i], group)]
        if self._on_computed is not None and stored:
            self._on_computed(group, [hashes[i] for i in stored])
        if self._events is not None:
            self._record_runs(request, group, stored)

    def _record_runs(self, request: Request, group: int, stored: list[int]) -> None:
        """Record an event for each run of blocks of the request that became findable."""
        if self._events is None or not stored:
            return
        first = previous = stored[0]
        for i in stored[1:]:
            if i != previous + 1:
                self._record_stored(request, group, first, previous + 1)
                first = i
            previous = i
        self._record_stored(request, group, first, previous + 1)

    def _record_stored(self, request: Request, group: int, start: int, end: int) -> None:
        assert self._events is not None
        size, hashes = self.block_size, request.block_hashes
        self._events.stored(
            block_hashes=hashes[start:end],
            parent_block_hash=hashes[start - 1] if start else None,
            token_ids=request.token_ids(start * size, end * size),
            block_size=size,
            extra_keys=block_extra_keys(start, end, size, request.options.cache_salt, request.cache_extra_keys),
            group=group,
            lora_name=request.options.adapter,
        )

    def free(self, request: Request) -> None:
        """Drop the request's references, last blocks first."""
        holding = self._requests.pop(request.request_id, None)
        if holding is None:
            return
        if len(holding.tables) == 1:
            self._pool.release(reversed(holding.tables[0]))
        else:
            # Groups side by side, so that no group's beginning becomes older than another group's end.
            for blocks in zip(*(reversed(table) for table in holding.tables), strict=True):
                self._pool.release(blocks)
        if holding.encoder_tables:
            self._encoder.release(request, holding)

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """A copy of the request's block table per group."""
        holding = self._requests[request_id]
        return tuple([list(table) for table in holding.tables + holding.encoder_tables])

    def num_slots(self, request_id: str) -> int:
        """Tokens that fit in the blocks the request holds."""
        holding = self._requests.get(request_id)
        return 0 if holding is None else holding.num_slots

    def max_request_tokens(self, max_step_tokens: int) -> int:
        """Longest request that can run alone in the cache. `sys.maxsize` when every group keeps
        a window only and the windows fit: then nothing bounds the length.

        Raises:
            AllocatorMisuseError: `max_step_tokens` is below 1.
        """
        if max_step_tokens < 1:
            raise AllocatorMisuseError(f"a step computes at least 1 token, got max_step_tokens={max_step_tokens}")
        num_blocks = self._pool.num_blocks - 1 - self._num_encoder_blocks
        # Blocks needed grow with the tokens: halve the range between what fits and what may not.
        low, high = 0, sys.maxsize
        while low < high:
            middle = (low + high + 1) // 2
            if sum(policy.max_blocks(middle, max_step_tokens) for policy in self._policies) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def block_states(self, block_ids: Sequence[int]) -> bytes:
        """Per block: 0 free, 1 free with a content that is findable, 2 in use."""
        references, hashes = self._pool.ref_counts, self._pool.block_hashes
        return bytes([2 if references[block] else hashes[block] is not None for block in block_ids])

    def usage(self) -> KVCacheUsage:
        """Free and total blocks."""
        return KVCacheUsage(self._pool.num_free, self._pool.num_blocks - 1)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks. Loads go on: what they bring is findable afterwards."""
        if self._requests:
            return False
        self._loads.unpin()
        for index in self._pool.indexes:
            self._history.remember_gone(index.blocks, "the prefix cache was reset")
        self._pool.clear_index()
        if self._events is not None:
            self._events.cleared()
        return True

    def take_events(self) -> list[KVCacheEvent]:
        """Events since the last call."""
        return [] if self._events is None else self._events.take()

    def events_since(self, sequence_number: int) -> list[KVCacheEvent]:
        """Replay: the events from this number on that are still kept (`kv_cache_event_buffer_size`), taken or not.

        When the first one's number is greater than the one asked for, the events between are lost.
        """
        return [] if self._events is None else self._events.since(sequence_number)

    def explain_miss(self, request: Request) -> PrefixCacheMiss:
        """Why the request's cached prefix ends where it does. Not for the request's sender: it
        can tell that another tenant's salt has the same beginning."""
        if not self.config.enable_prefix_caching:
            return PrefixCacheMiss(0, "disabled", "prefix caching is off (enable_prefix_caching)")
        num_blocks = self._num_hit_blocks(request)
        if not request.reads_prefix_cache:
            detail = "the request needs every prompt position computed (prompt logprobs)"
            return PrefixCacheMiss(0, "not_readable", detail)
        indexes = self._pool.indexes[: len(self._policies)]
        return explain_miss(request, num_blocks, self._policies, indexes, self._hasher, self._history)

    def check_integrity(self) -> None:
        """Check that references, free list, prefix index and block tables agree (slow; for tests and debugging).

        Raises:
            AssertionError: naming the block or request at fault.
        """
        check_integrity(self._pool, self._requests, self._loads.block_ids(), self._policies, self.block_size)

    def _on_evict(self, group: int, block_hashes: list[bytes]) -> None:
        self._history.remember_gone(block_hashes, "its block was needed for other tokens")
        self._stats = self._stats._replace(num_evicted_hashes=self._stats.num_evicted_hashes + len(block_hashes))
        if self._events is not None:
            self._events.removed(block_hashes, group)


def _num_released(pool: BlockPool, outdated: list[tuple[int, int, list[int]]]) -> int:
    """How many blocks become free when all of these are let go."""
    return pool.num_released_by(block for _, _, blocks in outdated for block in blocks)


def _check_counts(num_new_tokens: int, num_lookahead_tokens: int) -> None:
    if num_new_tokens < 0 or num_lookahead_tokens < 0:
        raise AllocatorMisuseError(
            f"cannot allocate {num_new_tokens} new and {num_lookahead_tokens} lookahead tokens: neither may be negative"
        )
