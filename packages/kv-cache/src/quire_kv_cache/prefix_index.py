"""Which block holds which content: block hash -> block id, for one group.

Two requests that compute the same prefix at the same time end up with two blocks of equal content. Both are kept (block
tables only grow, so neither request can change over), and the content stays findable until the last of them is evicted.
"""

from __future__ import annotations

__all__ = ["PrefixIndex"]


class PrefixIndex:
    """Hash -> block of one KV cache group."""

    __slots__ = ("blocks", "twins")

    def __init__(self) -> None:
        self.blocks: dict[bytes, int] = {}
        """Hash -> the block given to who asks. Read directly where speed matters; written only here."""
        self.twins: dict[bytes, dict[int, None]] = {}
        """Hash -> further blocks of the same content; few hashes have any."""

    def insert(self, block_hash: bytes, block_id: int) -> bool:
        """Make a block findable. True when the hash was not findable before."""
        if self.blocks.setdefault(block_hash, block_id) == block_id:
            return True
        self.twins.setdefault(block_hash, {})[block_id] = None
        return False

    def remove(self, block_hash: bytes, block_id: int) -> bool:
        """Forget a block. True when the hash is not findable any more."""
        twins = self.twins.get(block_hash)
        if twins is None:
            del self.blocks[block_hash]
            return True
        if self.blocks[block_hash] == block_id:
            block_id = next(iter(twins))
            self.blocks[block_hash] = block_id
        del twins[block_id]
        if not twins:
            del self.twins[block_hash]
        return False

    def clear(self) -> None:
        self.blocks.clear()
        self.twins.clear()
