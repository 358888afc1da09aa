"""What one request holds. Plain state: the manager is its only writer."""

from __future__ import annotations

__all__ = ["RequestBlocks"]


class RequestBlocks:
    """The block tables of one request and the positions at which something has to be done about them.

    The thresholds let the calls that happen for every request in every step return after one comparison.
    """

    __slots__ = (
        "cache_at",
        "encoder_is_new",
        "encoder_tables",
        "first_blocks",
        "num_cached_blocks",
        "num_slots",
        "release_at",
        "tables",
    )

    def __init__(self, tables: tuple[list[int], ...], first_blocks: list[int], num_slots: int) -> None:
        self.tables = tables
        """Per group of the decoder's own tokens, block ids in token order, all of one length."""
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
        self.encoder_tables: tuple[list[int], ...] = ()
        """Per cross-attention group, the blocks of what the encoder read."""
        self.encoder_is_new = False
        """These blocks are to be made findable once the first step is certain to be computed."""
