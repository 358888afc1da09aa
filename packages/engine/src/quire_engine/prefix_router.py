"""Which engine has which prefixes: a bounded table of blocks of token ids that were sent to each.

Knows hashes of prompts and ranks of engines; sends nothing. A wrong guess costs computing a prefix anew, nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from quire_engine.messages import AddRequest

__all__ = ["PrefixRouter"]

BYTES_PER_TOKEN = 4
"""Of `AddRequest.prompt`."""


class PrefixRouter:
    """Prefixes that were sent to engines, as chains of block hashes (a block's hash covers all before it).

    Args:
        block_size: Tokens of a block; a prefix counts in whole blocks, as in the engines' own prefix caches.
        num_blocks: Most blocks remembered of each engine, the ones used last: as many as its cache holds.
    """

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.block_size = max(1, block_size)
        self._num_blocks = max(1, num_blocks)
        self._blocks: dict[int, OrderedDict[int, None]] = {}
        """Rank -> hashes, the one used longest ago first."""

    def block_hashes(self, request: AddRequest) -> list[int]:
        """One hash for each whole block of the prompt. Requests of another salt, adapter, tenant of the cache or medium
        share none."""
        options, media = request.options, request.media
        num_bytes = self.block_size * BYTES_PER_TOKEN
        extra_keys = request.cache_extra_keys + (() if media is None else media.extra_keys)
        keys: dict[int, list[tuple[int, int, str]]] = {}
        for extra_key in extra_keys:
            keys.setdefault(extra_key[0] // self.block_size, []).append(extra_key)
        parent = hash((options.cache_salt, options.adapter, request.encoder_prompt))
        hashes = []
        for place in range(len(request.prompt) // num_bytes):
            block = request.prompt[place * num_bytes : (place + 1) * num_bytes]
            parent = hash((parent, block, *keys.get(place, ())))
            hashes.append(parent)
        return hashes

    def num_cached_tokens(self, rank: int, hashes: Sequence[int]) -> int:
        """Number of tokens of the longest prefix that was sent to this engine before."""
        blocks = self._blocks.get(rank)
        if not blocks:
            return 0
        num_blocks = next((place for place, each in enumerate(hashes) if each not in blocks), len(hashes))
        return num_blocks * self.block_size

    def record(self, rank: int, hashes: Sequence[int]) -> None:
        """A prompt of these blocks is sent to this engine."""
        blocks = self._blocks.setdefault(rank, OrderedDict())
        for each in reversed(hashes):  # the first block is used last: chains are forgotten from their ends
            blocks[each] = None
            blocks.move_to_end(each)
        while len(blocks) > self._num_blocks:
            blocks.popitem(last=False)

    def forget(self, rank: int) -> None:
        """The cache of this engine is empty."""
        self._blocks.pop(rank, None)
