"""Why a cached prefix ended where it did. Remembers just enough of the past to tell "evicted" from "never stored".

The reasons are for operators: that another salt has the same beginning is itself a secret between tenants, so do not
show them to the sender of the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from quire_interfaces import PrefixCacheMiss, Request
from quire_kv_cache.groups import GroupPolicy
from quire_kv_cache.hashing import BlockHasher
from quire_kv_cache.prefix_index import PrefixIndex

__all__ = ["PrefixHistory", "explain_miss"]

_MAX_SALTS = 64


class PrefixHistory:
    """Hashes that were findable once, and salts that were used; both bounded, oldest forgotten first.

    Args:
        capacity: Evicted hashes remembered.
    """

    __slots__ = ("_capacity", "gone", "salts")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.gone: dict[bytes, str] = {}
        """Hash -> how it went."""
        self.salts: dict[str | None, None] = {}

    def remember_gone(self, block_hashes: Iterable[bytes], how: str) -> None:
        gone = self.gone
        for block_hash in block_hashes:
            gone.pop(block_hash, None)  # so that it moves to the end
            gone[block_hash] = how
            if len(gone) > self._capacity:
                del gone[next(iter(gone))]

    def remember_salt(self, salt: str | None) -> None:
        self.salts.pop(salt, None)
        self.salts[salt] = None
        if len(self.salts) > _MAX_SALTS:
            del self.salts[next(iter(self.salts))]


def explain_miss(
    request: Request,
    num_hit_blocks: int,
    policies: Sequence[GroupPolicy],
    indexes: Sequence[PrefixIndex],
    hasher: BlockHasher,
    history: PrefixHistory,
) -> PrefixCacheMiss:
    """The reason why a request with `block_hashes` filled in hits `num_hit_blocks` blocks and not more."""
    size = hasher.block_size
    num_hit_tokens = num_hit_blocks * size
    max_blocks = max(request.num_tokens - 1, 0) // size
    if max_blocks == 0:
        detail = f"{request.num_tokens} tokens: only whole blocks of {size} tokens before the last token are shared"
        return PrefixCacheMiss(0, "partial_block", detail)
    if num_hit_blocks == max_blocks:
        detail = f"all {max_blocks} whole blocks before the last token were found"
        return PrefixCacheMiss(num_hit_tokens, "full_hit", detail)
    missing = list(_missing(request, num_hit_blocks, max_blocks, policies, indexes, size))
    for group, block in missing:
        how = history.gone.get(request.block_hashes[block])
        if how is not None:
            return PrefixCacheMiss(num_hit_tokens, "evicted", f"{_place(group, block, size)}: {how}")
    if num_hit_blocks == 0 and _stored_under_other_salt(request, indexes, hasher, history):
        return PrefixCacheMiss(0, "different_salt", f"the first {size} tokens are cached under another cache_salt")
    group, block = missing[0]
    detail = f"{_place(group, block, size)}: no request before had the same tokens and keys up to its end"
    return PrefixCacheMiss(num_hit_tokens, "never_stored", detail)


def _place(group: int, block: int, size: int) -> str:
    return f"tokens {block * size} to {(block + 1) * size - 1} (group {group})"


def _missing(
    request: Request,
    num_hit_blocks: int,
    max_blocks: int,
    policies: Sequence[GroupPolicy],
    indexes: Sequence[PrefixIndex],
    size: int,
) -> Iterator[tuple[int, int]]:
    """(group, block) of the first block that each group lacks for the next larger hit, then for the largest one."""
    for end in (num_hit_blocks + 1, max_blocks):
        for group, (policy, index) in enumerate(zip(policies, indexes, strict=True)):
            for block in range(policy.first_read_block(end * size), end):
                if request.block_hashes[block] not in index.blocks:
                    yield group, block
                    break


def _stored_under_other_salt(
    request: Request, indexes: Sequence[PrefixIndex], hasher: BlockHasher, history: PrefixHistory
) -> bool:
    first_block = request.token_ids(0, hasher.block_size)
    for salt in history.salts:
        if salt != request.options.cache_salt:
            parent = None
            if request.encoder_token_ids:
                parent = hasher.hash_encoder(request.encoder_token_ids, salt, request.cache_extra_keys)
            (block_hash,) = hasher.hash(first_block, parent, 0, salt, request.cache_extra_keys)
            if any(block_hash in index.blocks for index in indexes):
                return True
    return False
