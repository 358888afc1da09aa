"""What differs between kinds of KV cache groups: which cached blocks a hit needs, and when a block is no longer read.

A new kind is one `GroupPolicy` and one entry in `GROUP_POLICIES`; the manager and the
coordinator know groups only through it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Sequence
from typing import Protocol

from quire_interfaces import (
    ChunkedLocalSpec,
    ConfigError,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    LatentAttentionSpec,
    MambaSpec,
    SlidingLatentSpec,
    SlidingWindowSpec,
)

__all__ = [
    "GROUP_POLICIES",
    "NEVER",
    "ChunkedLocalGroup",
    "CrossAttentionGroup",
    "FullAttentionGroup",
    "GroupPolicy",
    "SlidingWindowGroup",
    "StateSpaceGroup",
    "make_group_policy",
]

NEVER = sys.maxsize


class GroupPolicy(Protocol):
    """The rules of one KV cache group. Stateless: everything it decides follows from its arguments."""

    keeps_states: bool
    """A block holds the state at its end instead of something for each of its tokens: a step leaves most of the blocks
    it runs through empty, and those it fills are worth keeping until they are findable."""

    def longest_prefix(self, index: Container[bytes], block_hashes: Sequence[bytes], max_blocks: int) -> int:
        """Most blocks n <= max_blocks such that a request can go on after its first n blocks: every block from
        `first_read_block(n * block_size)` to n is in `index`."""

    def first_read_block(self, num_computed_tokens: int) -> int:
        """Blocks before this one are read by no token from position `num_computed_tokens` on."""

    def first_written_block(self, end: int) -> int:
        """Of the blocks that a step ending before position `end` adds, those before this one stay empty."""

    def next_release(self, first_read_block: int) -> int:
        """Smallest position whose `first_read_block` is greater than this one, or NEVER."""

    def max_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """Blocks a request of `num_tokens` tokens holds at most when a step computes at most `max_step_tokens`."""


class FullAttentionGroup:
    """Every token reads all tokens before it."""

    __slots__ = ("block_size",)
    keeps_states = False

    def __init__(self, spec: KVCacheSpec) -> None:
        self.block_size = spec.block_size

    def longest_prefix(self, index: Container[bytes], block_hashes: Sequence[bytes], max_blocks: int) -> int:
        for i in range(max_blocks):
            if block_hashes[i] not in index:
                return i
        return max_blocks

    def first_read_block(self, num_computed_tokens: int) -> int:
        return 0

    def first_written_block(self, end: int) -> int:
        return 0

    def next_release(self, first_read_block: int) -> int:
        return NEVER

    def max_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


class CrossAttentionGroup(FullAttentionGroup):
    """Every token reads all that the encoder read, however many tokens there are; prefixes need nothing of it. Its
    blocks are counted out by `encoder_blocks.py`."""

    __slots__ = ("max_encoder_blocks",)

    def __init__(self, spec: CrossAttentionSpec) -> None:
        if spec.max_encoder_tokens < 1:
            raise ConfigError(f"max_encoder_tokens must be at least 1, got {spec.max_encoder_tokens}")
        super().__init__(spec)
        self.max_encoder_blocks = spec.max_blocks(0)

    def longest_prefix(self, index: Container[bytes], block_hashes: Sequence[bytes], max_blocks: int) -> int:
        return max_blocks

    def max_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        return self.max_encoder_blocks


class SlidingWindowGroup:
    """A token reads itself and the `sliding_window - 1` tokens before it."""

    __slots__ = ("block_size", "num_tokens_before")
    keeps_states = False

    def __init__(self, spec: SlidingWindowSpec | SlidingLatentSpec) -> None:
        if spec.sliding_window < 1:
            raise ConfigError(
                f"sliding_window must be at least 1 token, got {spec.sliding_window}", field="sliding_window"
            )
        self.block_size = spec.block_size
        self.num_tokens_before = spec.sliding_window - 1

    def longest_prefix(self, index: Container[bytes], block_hashes: Sequence[bytes], max_blocks: int) -> int:
        return _longest_run(self, self.block_size, index, block_hashes, max_blocks)

    def first_read_block(self, num_computed_tokens: int) -> int:
        return max(num_computed_tokens - self.num_tokens_before, 0) // self.block_size

    def first_written_block(self, end: int) -> int:
        return 0

    def next_release(self, first_read_block: int) -> int:
        return (first_read_block + 1) * self.block_size + self.num_tokens_before

    def max_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        # A step reads the window before its first token and writes its own tokens, from any slot of a block.
        num_read_and_written = self.num_tokens_before + max_step_tokens
        return min(-(-num_tokens // self.block_size), -(-(num_read_and_written - 1) // self.block_size) + 1)


class ChunkedLocalGroup:
    """A token reads the tokens of its chunk up to itself; where a chunk ends, all its blocks come back."""

    __slots__ = ("block_size", "chunk_tokens")
    keeps_states = False

    def __init__(self, spec: ChunkedLocalSpec) -> None:
        if spec.chunk_tokens < 1 or spec.chunk_tokens % spec.block_size:
            raise ConfigError(
                f"chunks of {spec.chunk_tokens} tokens are not whole blocks of {spec.block_size} tokens; choose a "
                "block size that divides the model's attention_chunk_size",
                field="block_size",
            )
        self.block_size = spec.block_size
        self.chunk_tokens = spec.chunk_tokens

    def longest_prefix(self, index: Container[bytes], block_hashes: Sequence[bytes], max_blocks: int) -> int:
        return _longest_run(self, self.block_size, index, block_hashes, max_blocks)

    def first_read_block(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self.chunk_tokens * self.chunk_tokens // self.block_size

    def first_written_block(self, end: int) -> int:
        return 0

    def next_release(self, first_read_block: int) -> int:
        return first_read_block * self.block_size + self.chunk_tokens

    def max_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        # A step reads from the beginning of its first token's chunk, which is where a block begins.
        return -(-min(num_tokens, self.chunk_tokens - 1 + max_step_tokens) // self.block_size)


class StateSpaceGroup:
    """A token reads the state after the token before it.

    Of the blocks that a step runs through, two get a state: the last, where the request goes on from, and the last one
    that the step completes, where another request with the same beginning can go on. So a state is kept at the end of
    each step's whole blocks (of each whole block in decode) rather than for each block of a prompt.
    """

    __slots__ = ("block_size",)
    keeps_states = True

    def __init__(self, spec: MambaSpec) -> None:
        if not spec.block_bytes:
            raise ConfigError("a state-space layer must keep some state; its spec names no tensor, or empty ones")
        self.block_size = spec.block_size

    def longest_prefix(self, index: Container[bytes], block_hashes: Sequence[bytes], max_blocks: int) -> int:
        return next((end for end in range(max_blocks, 0, -1) if block_hashes[end - 1] in index), 0)

    def first_read_block(self, num_computed_tokens: int) -> int:
        return max(num_computed_tokens - 1, 0) // self.block_size

    def first_written_block(self, end: int) -> int:
        return max(end // self.block_size - 1, 0)

    def next_release(self, first_read_block: int) -> int:
        return (first_read_block + 1) * self.block_size + 1

    def max_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        # What is read, what the step ends in, and in a long step the whole block before that.
        return min(-(-num_tokens // self.block_size), 3 if max_step_tokens > self.block_size > 1 else 2)


def _longest_run(
    policy: GroupPolicy, block_size: int, index: Container[bytes], block_hashes: Sequence[bytes], max_blocks: int
) -> int:
    """From the end: the last run of present blocks that is long enough, or that reaches the beginning."""
    end = max_blocks
    first_needed = policy.first_read_block(end * block_size)
    i = end - 1
    while i >= first_needed:
        if block_hashes[i] not in index:
            end = i
            first_needed = policy.first_read_block(end * block_size)
        i -= 1
    return end


GROUP_POLICIES: dict[type[KVCacheSpec], Callable[..., GroupPolicy]] = {
    FullAttentionSpec: FullAttentionGroup,
    LatentAttentionSpec: FullAttentionGroup,
    ChunkedLocalSpec: ChunkedLocalGroup,
    CrossAttentionSpec: CrossAttentionGroup,
    SlidingLatentSpec: SlidingWindowGroup,
    SlidingWindowSpec: SlidingWindowGroup,
    MambaSpec: StateSpaceGroup,
}
"""Spec type -> its policy; a spec of a subclass gets the policy of its nearest base."""


def make_group_policy(spec: KVCacheSpec) -> GroupPolicy:
    """The policy of a spec.

    Raises:
        ConfigError: no policy is known for this kind of spec.
    """
    for kind in type(spec).__mro__:
        if kind in GROUP_POLICIES:
            return GROUP_POLICIES[kind](spec)
    known = ", ".join(kind.__name__ for kind in GROUP_POLICIES)
    raise ConfigError(f"no KV cache group policy for {type(spec).__name__}; known are {known} and their subclasses")
