"""Everything that must be true of the cache between two calls, checked the slow way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from quire_interfaces import NULL_BLOCK_ID
from quire_kv_cache.block_pool import BlockPool
from quire_kv_cache.groups import GroupPolicy
from quire_kv_cache.request_blocks import RequestBlocks

__all__ = ["check_integrity"]


def check_integrity(
    pool: BlockPool,
    requests: Mapping[str, RequestBlocks],
    loading: Iterable[int],
    policies: Sequence[GroupPolicy],
    block_size: int,
) -> None:
    """Compare references, free list, prefix indexes and block tables with each other.

    Args:
        pool: The blocks.
        requests: What each request holds.
        loading: Blocks held by loads, once per reference.
        policies: Rules of each group.
        block_size: Tokens in a block.

    Raises:
        AssertionError: naming the block or request at fault.
    """
    _check_references(pool, requests, loading)
    _check_indexes(pool)
    for request_id, holding in requests.items():
        _check_tables(pool, request_id, holding, policies, block_size)
        for group, table in enumerate(holding.encoder_tables, len(policies)):
            _check_content(pool, f"{request_id}, group {group}", group, table)
            assert NULL_BLOCK_ID not in table, f"{request_id}, group {group}: a block of the encoder input is null"


def _check_references(pool: BlockPool, requests: Mapping[str, RequestBlocks], loading: Iterable[int]) -> None:
    counted = Counter(
        block for holding in requests.values() for table in holding.tables + holding.encoder_tables for block in table
    )
    counted.update(loading)
    del counted[NULL_BLOCK_ID]
    free = pool.free_block_ids()
    assert len(free) == pool.num_free, f"{len(free)} blocks are in the free list, {pool.num_free} are counted"
    is_free = set(free)
    assert len(is_free) == len(free), "a block is in the free list twice"
    assert pool.ref_counts[NULL_BLOCK_ID] == 0, "the null block is referenced"
    assert pool.block_hashes[NULL_BLOCK_ID] is None, "the null block has content"
    for block in range(1, pool.num_blocks):
        num_holders = counted[block]
        references = pool.ref_counts[block]
        assert references == num_holders, f"block {block}: {references} references, but {num_holders} tables and loads"
        assert (block in is_free) == (num_holders == 0), (
            f"block {block}: held {num_holders} times, free: {block in is_free}"
        )
        assert num_holders <= 1 or pool.block_hashes[block] is not None, f"block {block} is shared, but has no content"


def _check_indexes(pool: BlockPool) -> None:
    places: dict[int, tuple[int, bytes]] = {}
    for group, index in enumerate(pool.indexes):
        assert index.twins.keys() <= index.blocks.keys(), f"group {group}: twins of a hash that is not findable"
        for block_hash, block in index.blocks.items():
            twins = index.twins.get(block_hash)
            assert twins is None or twins, f"group {group}: empty twins of {block_hash.hex()}"
            for member in (block, *(twins or ())):
                assert member not in places, f"block {member} is in the prefix index twice"
                places[member] = (group, block_hash)
    for block, content in enumerate(pool.block_hashes):
        expected = None if content is None else (pool.block_groups[block], content)
        assert places.get(block) == expected, f"block {block}: index says {places.get(block)}, block says {expected}"


def _check_tables(
    pool: BlockPool, request_id: str, holding: RequestBlocks, policies: Sequence[GroupPolicy], block_size: int
) -> None:
    lengths = {len(table) for table in holding.tables}
    expected = holding.num_slots // block_size
    assert lengths == {expected}, f"{request_id}: tables of {lengths} blocks, expected {expected}"
    for group, (table, first) in enumerate(zip(holding.tables, holding.first_blocks, strict=True)):
        where = f"{request_id}, group {group}"
        assert not any(table[:first]), f"{where}: a block before the first read one is held"
        read = table[-1:] if policies[group].keeps_states else table[first:]
        assert all(read), f"{where}: a block that is read is null"
        _check_content(pool, where, group, [block for block in table if block != NULL_BLOCK_ID])


def _check_content(pool: BlockPool, where: str, group: int, block_ids: Sequence[int]) -> None:
    assert len(set(block_ids)) == len(block_ids), f"{where}: a block stands in the table twice"
    for block in block_ids:
        of_group = pool.block_hashes[block] is None or pool.block_groups[block] == group
        assert of_group, f"{where}: block {block} holds content of group {pool.block_groups[block]}"
