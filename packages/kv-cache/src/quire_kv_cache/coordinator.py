"""The longest prefix on which all groups agree.

A full-attention group can go on after any shorter prefix of what it has; a sliding-window group only where the window
before the end is whole. So each group in turn cuts the candidate down, until a round in which none did (a candidate
only shrinks, hence this ends).
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from quire_interfaces import NULL_BLOCK_ID
from quire_kv_cache.groups import GroupPolicy
from quire_kv_cache.prefix_index import PrefixIndex

__all__ = ["prefix_block_ids", "shared_prefix_blocks"]


def shared_prefix_blocks(
    policies: Sequence[GroupPolicy],
    indexes: Sequence[Container[bytes]],
    block_hashes: Sequence[bytes],
    max_blocks: int,
) -> int:
    """Most blocks n <= max_blocks after which every group can go on; `indexes` say per group which hashes are there."""
    agreed = max_blocks
    num_agreeing = 0
    turn = 0
    while agreed and num_agreeing < len(policies):
        candidate = policies[turn].longest_prefix(indexes[turn], block_hashes, agreed)
        num_agreeing = num_agreeing + 1 if candidate == agreed else 1
        agreed = candidate
        turn = (turn + 1) % len(policies)
    return agreed


def prefix_block_ids(
    policies: Sequence[GroupPolicy],
    indexes: Sequence[PrefixIndex],
    block_hashes: Sequence[bytes],
    num_blocks: int,
    block_size: int,
) -> tuple[list[int], ...]:
    """Per group, the blocks of a prefix that all groups have; null blocks where nothing is read any more."""
    tables = []
    for policy, index in zip(policies, indexes, strict=True):
        first = policy.first_read_block(num_blocks * block_size)
        blocks = index.blocks
        block_ids = [blocks[block_hash] for block_hash in block_hashes[first:num_blocks]]
        tables.append([NULL_BLOCK_ID] * first + block_ids if first else block_ids)
    return tuple(tables)
