"""The blocks of cross-attention groups: keys and values of what a request's encoder read.

They are taken together with the request's first blocks, as many as its input needs, never grow, and go with the
request. Every output of an encoder depends on all of its input, so requests share them only when their whole inputs are
equal; the decoders' prompts may differ.

Who transcribes a recording asks a few times about each window of it, and never again. Encoder inputs made of media that
no request needs any more therefore do not wait until the whole cache is full, which in the default size holds hours of
audio: their blocks are taken next.

Knows the pool and hashes; computes nothing, and does not know whether an encoder ran.
"""

from __future__ import annotations

from quire_interfaces import Request
from quire_kv_cache.block_pool import BlockPool
from quire_kv_cache.events import EventLog
from quire_kv_cache.hashing import BlockHasher, block_extra_keys
from quire_kv_cache.request_blocks import RequestBlocks

__all__ = ["EncoderBlocks"]

_MIN_IDLE_INPUTS = 4
"""Least number of encoder inputs made of media that are kept although no request holds them."""


class EncoderBlocks:
    """Finds, counts and stores them; who holds which is written in `RequestBlocks.encoder_tables`.

    Args:
        pool: Gives and takes the blocks.
        hasher: Names their contents.
        groups: Which groups of the plan are cross attention; the last ones.
    """

    def __init__(self, pool: BlockPool, hasher: BlockHasher, groups: range) -> None:
        self._pool = pool
        self._hasher = hasher
        self.groups = groups
        self._media_inputs: dict[bytes, dict[int, bytes]] = {}
        """Hash of an encoder input made of media that is findable -> its blocks and those of decoders behind it, with
        the hashes of their contents; the first is one of the encoder's. Least recently held first."""
        self._most_in_use = 0
        """Most encoder inputs made of media that requests held at a time."""

    def find(self, request: Request) -> tuple[list[int], ...]:
        """Per group, the blocks of the request's encoder input; empty lists unless all of them are there."""
        hashes = self._hasher.encoder_block_hashes(request) if request.encoder_token_ids else []
        tables = []
        for group in self.groups:
            blocks = self._pool.indexes[group].blocks
            tables.append([blocks[each] for each in hashes if each in blocks])
        return tuple(tables) if all(len(table) == len(hashes) for table in tables) else self.nothing()

    def nothing(self) -> tuple[list[int], ...]:
        """An empty list for each group."""
        return tuple([[] for _ in self.groups])

    def num_blocks(self, request: Request) -> int:
        """Blocks that the request's encoder input takes in all groups together."""
        return -(-len(request.encoder_token_ids) // self._hasher.block_size) * len(self.groups)

    def take(self, request: Request) -> tuple[list[int], ...]:
        """New blocks for the request's encoder input. The caller has checked that there are enough."""
        if request.media is not None:
            self._forget_idle_media()
        count = -(-len(request.encoder_token_ids) // self._hasher.block_size)
        return tuple([self._pool.take(count) for _ in self.groups])

    def release(self, request: Request, holding: RequestBlocks) -> None:
        """Drop the references to what the encoder read, once those to the decoder's blocks are dropped."""
        for table in holding.encoder_tables:
            self._pool.release(reversed(table))
        blocks = None if request.media is None else self._media_inputs.pop(request.encoder_hash, None)
        if blocks is not None:
            self._media_inputs[request.encoder_hash] = blocks
            self._note(blocks, holding.tables)

    def _note(self, blocks: dict[int, bytes], tables: tuple[list[int], ...]) -> None:
        hashes = self._pool.block_hashes
        blocks.update((block, each) for table in tables for block in table if (each := hashes[block]) is not None)

    def _forget_idle_media(self) -> None:
        """Let go of encoder inputs made of media that no request holds, beyond as many as requests held at a time."""
        idle, pool = [], self._pool
        for key, blocks in list(self._media_inputs.items()):
            first = next(iter(blocks))
            if pool.block_hashes[first] != blocks[first]:
                del self._media_inputs[key]  # others took its blocks
            elif not pool.ref_counts[first]:
                idle.append(key)
        self._most_in_use = max(self._most_in_use, len(self._media_inputs) - len(idle) + 1)
        for key in idle[: max(0, len(idle) - max(_MIN_IDLE_INPUTS, self._most_in_use))]:
            pool.forget(self._media_inputs.pop(key))

    def is_fresh(self, request: Request, tables: tuple[list[int], ...]) -> bool:
        """Whether blocks that `find` gave still hold the request's encoder input."""
        return all(not table for table in tables) or tables == self.find(request)

    def store(self, request: Request, tables: tuple[list[int], ...], events: EventLog | None) -> None:
        """Make the blocks findable: they have been, or are being, computed."""
        hashes = self._hasher.encoder_block_hashes(request)
        for group, table in zip(self.groups, tables, strict=True):
            is_new = [self._pool.store(block, each, group) for block, each in zip(table, hashes, strict=True)]
            if events is not None and any(is_new):
                self._record(request, group, hashes, is_new, events)
        if request.media is not None:
            self._note(self._media_inputs.setdefault(request.encoder_hash, {}), tables)

    def _record(self, request: Request, group: int, hashes: list[bytes], is_new: list[bool], events: EventLog) -> None:
        """One event for each block that became findable: which others are there already depends on evictions."""
        size, tokens = self._hasher.block_size, request.encoder_token_ids
        for block, each in enumerate(hashes):
            if is_new[block]:
                events.stored(
                    block_hashes=[each],
                    parent_block_hash=request.encoder_hash,
                    token_ids=tokens[block * size : (block + 1) * size],
                    block_size=size,
                    extra_keys=block_extra_keys(
                        block, block + 1, size, request.options.cache_salt, request.cache_extra_keys
                    ),
                    group=group,
                    lora_name=request.options.adapter,
                )
