"""What one request holds. Plain state: the manager is its only writer."""

from __future__ import annotations

__all__ = ["RequestBlocks"]


class RequestBlocks:
    """The block tables of one request and the positions at which something has to be done about them.

    The thresholds let the calls that happen for every request in every step return after one comparison.
    """

    __slots__ = ("cache_at", "first_blocks", "num_cached_blocks", "num_slots", "release_at", "tables")

    def __init__(self, tables: tuple[list[int], ...], first_blocks: list[int], num_slots: int) -> None:
        self.tables = tables
        """Per group, block ids in token order, all of one length."""
        self.first_blocks = first_blocks
        """Per group, the leading blocks that were given back (null in the table)."""
        self.num_slots = num_slots
        """Tokens that fit in the blocks held."""
        self.num_cached_blocks = 0
        """Leading blocks whose content is in the prefix index, or was when they were given back."""
        self.cache_at = 0
        """Number of computed tokens that completes the next block to be made findable."""
        self.release_at = 0
        """Position from which on some group reads one block less."""
