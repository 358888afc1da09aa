"""The vocabulary of the paged KV cache: what a layer keeps per token, how layers form groups, and the cache's events.

A *block* is a fixed number of token slots; block ids are shared by all groups (one pool). Block 0 is the null block:
never handed out, a placeholder in block tables where no KV is kept (for example before a sliding window).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, Protocol

from quire_interfaces.errors import ConfigError
from quire_interfaces.request import Request

__all__ = [
    "ATTENTION_WORKSPACE",
    "FEW_TOKENS",
    "FP8_DS_MLA",
    "KV_CACHE_DTYPES",
    "LATENT_CACHE_DTYPES",
    "NULL_BLOCK_ID",
    "AllBlocksCleared",
    "BlockAllocator",
    "BlockRemoved",
    "BlockStored",
    "CachedPrefix",
    "ChunkedLocalSpec",
    "CrossAttentionSpec",
    "FullAttentionSpec",
    "KVCacheEvent",
    "KVCacheGroup",
    "KVCachePlan",
    "KVCacheSpec",
    "KVCacheUsage",
    "LatentAttentionSpec",
    "MambaSpec",
    "PrefixCacheMiss",
    "SlidingLatentSpec",
    "SlidingWindowSpec",
    "StateTensor",
    "kv_row_bytes",
    "latent_row_bytes",
]

NULL_BLOCK_ID = 0

FEW_TOKENS = 8
"""Up to so many tokens in a step, attention on GPUs takes a sequence for decoding, and may divide its keys among
several programs; with more, for a prompt. What is captured in graphs, and planned for them, depends on it."""

ATTENTION_WORKSPACE = 1 << 22
"""Scores that torch's forms of attention without a fused operator hold at once: queries are taken in pieces."""

STATE_ALIGNMENT_BYTES = 64
STATE_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

KV_CACHE_DTYPES = {"float32": 32, "bfloat16": 16, "float16": 16, "fp8_e4m3": 8, "fp8_e5m2": 8, "int8": 8, "int4": 4}
"""What keys and values are kept in -> bits of an element. int8 and int4 rows carry a float32 scale of their own."""

ROW_SCALE_BYTES = {"int8": 4, "int4": 4}

FP8_DS_MLA = "fp8_ds_mla"
"""The published layout of latents in fp8 (DeepSeek-V3.2; the name is vLLM's): the latent in float8_e4m3 with a float32
scale for each 128 numbers, and what follows it in bfloat16 (`quire_ops.latent_format`)."""

LATENT_CACHE_DTYPES = ("float32", "bfloat16", "float16", FP8_DS_MLA)
"""What rows of latents are kept in."""

LATENT_GROUP = 128
"""Numbers of a latent that share a scale in `FP8_DS_MLA`; the last group may have fewer."""


def kv_row_bytes(dtype: str, head_dim: int) -> int:
    """Bytes of a row: the key (or value) of one token and one head.

    Args:
        dtype: A name of `KV_CACHE_DTYPES`.
        head_dim: Elements of the row.

    Raises:
        ConfigError: there is no such name, or the row is not a whole number of bytes.
    """
    if dtype == FP8_DS_MLA:
        raise ConfigError(
            f"{FP8_DS_MLA} is for latents (multi-head latent attention), and this model keeps keys and values; choose "
            f"one of {', '.join(KV_CACHE_DTYPES)}",
            field="kv_cache_dtype",
        )
    if dtype not in KV_CACHE_DTYPES:
        raise ConfigError(
            f"there is no KV cache dtype {dtype!r}; choose one of {', '.join(KV_CACHE_DTYPES)}", field="kv_cache_dtype"
        )
    bits = head_dim * KV_CACHE_DTYPES[dtype]
    if bits % 8:
        raise ConfigError(
            f"a KV cache in {dtype} needs an even head dimension, and this model's is {head_dim}; choose int8 or fp8",
            field="kv_cache_dtype",
        )
    return bits // 8 + ROW_SCALE_BYTES.get(dtype, 0)


def latent_row_bytes(dtype: str, width: int, rank: int) -> int:
    """Bytes of a row of latent attention: what is kept of one token.

    Args:
        dtype: One of `LATENT_CACHE_DTYPES`.
        width: Numbers of the row.
        rank: Numbers of the latent, with which it begins; 0 for a row without.

    Raises:
        ConfigError: Rows are not kept in this dtype, or have no whole words of it.
    """
    if dtype not in LATENT_CACHE_DTYPES or (dtype == FP8_DS_MLA and not rank):
        choices = LATENT_CACHE_DTYPES if rank else LATENT_CACHE_DTYPES[:-1]
        raise ConfigError(
            f"{'latents' if rank else 'keys of an index'} are not kept in {dtype}; the KV cache of this network can be "
            f"{', '.join(choices)} (kv_cache_dtype auto)",
            field="kv_cache_dtype",
        )
    if dtype != FP8_DS_MLA:
        return width * KV_CACHE_DTYPES[dtype] // 8
    if rank % 4 or width % 2:
        raise ConfigError(
            f"{FP8_DS_MLA} needs a latent of a multiple of 4 numbers and an even number behind it; this model's are "
            f"{rank} and {width - rank}; choose one of {', '.join(LATENT_CACHE_DTYPES[:-1])}",
            field="kv_cache_dtype",
        )
    return rank + 4 * -(-rank // LATENT_GROUP) + 2 * (width - rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """What one layer keeps per block. Layers with equal specs can share a group."""

    block_size: int
    """Token slots in a block."""
    dcp_size: int = 1
    """Decode context parallel ranks that the tokens of a block are interleaved over: slot i of a block is with rank
    i % dcp_size, which has block_size // dcp_size of them."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer, of one rank."""
        raise NotImplementedError(f"{type(self).__name__} does not say how many bytes a block takes")

    def max_blocks(self, num_tokens: int) -> int:
        """Blocks of this layer's group that a request of `num_tokens` tokens holds at most."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionSpec(KVCacheSpec):
    """Keys and values of every token."""

    num_kv_heads: int
    head_dim: int
    dtype: str
    """What they are kept in: a name of `KV_CACHE_DTYPES`."""

    @property
    def block_bytes(self) -> int:
        return 2 * self.block_size // self.dcp_size * self.num_kv_heads * kv_row_bytes(self.dtype, self.head_dim)


def _window_blocks(num_tokens: int, sliding_window: int, block_size: int) -> int:
    """Blocks of a sequence whose tokens see a window."""
    # The window may begin in the middle of a block, hence one more; while a prefill chunk is computed the blocks
    # of the chunk itself are held too, which the coordinator adds.
    return min(-(-num_tokens // block_size), -(-(sliding_window - 1) // block_size) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec(FullAttentionSpec):
    """Keys and values of the last `sliding_window` tokens (a token sees itself and sliding_window - 1 before it)."""

    sliding_window: int

    def max_blocks(self, num_tokens: int) -> int:
        return _window_blocks(num_tokens, self.sliding_window, self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocalSpec(FullAttentionSpec):
    """Keys and values of the chunk that a token is in: position p attends from p - p % `chunk_tokens` on (Llama 4)."""

    chunk_tokens: int
    """A multiple of the block size."""

    def max_blocks(self, num_tokens: int) -> int:
        return -(-min(num_tokens, self.chunk_tokens) // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttentionSpec(FullAttentionSpec):
    """Keys and values of what the encoder read (`Request.encoder_token_ids`): written once, in the request's first
    step, and read by every token of the decoder."""

    max_encoder_tokens: int
    """Most tokens that the encoder reads for one request."""

    def max_blocks(self, num_tokens: int) -> int:
        return -(-self.max_encoder_tokens // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionSpec(KVCacheSpec):
    """One row for every token, from which all heads' keys and values are made: its latent, then the part of the key
    that is rotated (multi-head latent attention, DeepSeek-AI 2024)."""

    width: int
    """Numbers of a row."""
    rank: int = 0
    """Numbers of the latent, with which a row begins; 0 where rows are something else, such as keys of an index."""
    dtype: str
    """One of `LATENT_CACHE_DTYPES`."""

    def __post_init__(self) -> None:
        latent_row_bytes(self.dtype, self.width, self.rank)  # raises ConfigError

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return latent_row_bytes(self.dtype, self.width, self.rank)

    @property
    def block_bytes(self) -> int:
        return self.block_size // self.dcp_size * self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingLatentSpec(LatentAttentionSpec):
    """Such rows of the last `sliding_window` tokens (a token sees itself and sliding_window - 1 before it)."""

    sliding_window: int

    def max_blocks(self, num_tokens: int) -> int:
        return _window_blocks(num_tokens, self.sliding_window, self.block_size)


class StateTensor(NamedTuple):
    """One tensor of a recurrent layer's state."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As torch names it: "float32", "bfloat16" or "float16"."""

    @property
    def num_bytes(self) -> int:
        """Bytes it takes in a block, rounded up so that the tensor after it is aligned."""
        size = prod(self.shape) * STATE_DTYPE_BYTES[self.dtype]
        return -(-size // STATE_ALIGNMENT_BYTES) * STATE_ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """The state of a recurrent layer: state space, linear attention, short convolution.

    A block holds the state after the last computed one of its `block_size` tokens, whatever their number: a request
    reads the block of the token before its first new one, and writes the block of its last one. A state is stored
    where a block ends, beside that, if the request has a block there (not the null block).
    """

    states: tuple[StateTensor, ...]

    @property
    def block_bytes(self) -> int:
        return sum(state.num_bytes for state in self.states)

    def max_blocks(self, num_tokens: int) -> int:
        # At the first token of a block, the state before it is read from the block before.
        return min(-(-num_tokens // self.block_size), 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroup:
    """Layers that share one block table."""

    spec: KVCacheSpec
    layer_names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCachePlan:
    """The cache as allocated: the same plan is read by the block pool and by the runner.

    Each tensor holds `num_blocks` blocks; layer i of every group uses tensor i (block ids are unique across groups, so
    layers of different groups can share a tensor without meeting).
    """

    groups: tuple[KVCacheGroup, ...]
    num_blocks: int
    """Including the null block."""
    tensor_block_bytes: tuple[int, ...]
    """Bytes of one block in each tensor; as many as the largest group has layers."""

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * sum(self.tensor_block_bytes)


class CachedPrefix(NamedTuple):
    """The longest prefix of a request that the cache holds; valid until the allocator is next changed."""

    num_tokens: int
    block_ids: tuple[list[int], ...]
    """Per group, null blocks included."""
    has_encoder: bool = False
    """The keys and values of the request's whole encoder input are there, in the blocks of the cross-attention groups;
    otherwise none of them are listed."""


class KVCacheUsage(NamedTuple):
    num_free_blocks: int
    """Blocks that can be handed out now (cached but unused ones included)."""
    num_total_blocks: int
    """Without the null block."""


class PrefixCacheMiss(NamedTuple):
    """Why the cached prefix of a request ended where it did."""

    num_hit_tokens: int
    reason: str
    """One of: "full_hit", "never_stored", "evicted", "different_salt", "partial_block", "disabled", "not_readable"."""
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheEvent:
    """Something that happened to the prefix index. `sequence_number` grows by one per event and never repeats."""

    sequence_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored(KVCacheEvent):
    """Full blocks became findable."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    extra_keys: list[tuple[str, ...] | None] = field(default_factory=list)
    """Per block: media, adapter, salt and prompt-embedding keys, None when the tokens alone identify it."""
    group: int = 0
    lora_name: str | None = None
    """Name of the adapter that the blocks were computed with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved(KVCacheEvent):
    """Blocks are no longer findable (evicted)."""

    block_hashes: list[bytes]
    group: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AllBlocksCleared(KVCacheEvent):
    """The prefix index was emptied."""


class BlockAllocator(Protocol):
    """What the scheduler may ask of the KV cache. Requests are known by their `request_id`.

    The caller must `free` each request it allocated for exactly once per allocation period (finish or preemption).
    """

    @property
    def num_groups(self) -> int: ...

    def max_request_tokens(self, max_step_tokens: int) -> int:
        """Most tokens that one request can have computed when it has the whole cache to itself and a step computes at
        most `max_step_tokens` of them (sliding-window groups hold a step's tokens beside their window)."""

    def find_cached_prefix(self, request: Request) -> CachedPrefix:
        """Longest cached prefix of the request's known tokens, at most num_tokens - 1 (one token must be computed), and
        what the encoder made of the request's whole encoder input, if that is there.

        Extends `request.block_hashes` to all whole blocks of known tokens; changes nothing else (no reference is
        taken until `allocate`). Returns zero tokens when `request.reads_prefix_cache` is False.
        """

    def allocate(
        self,
        request: Request,
        num_new_tokens: int,
        cached: CachedPrefix | None = None,
        num_lookahead_tokens: int = 0,
    ) -> tuple[list[int], ...] | None:
        """Give the request slots for `num_new_tokens` tokens after `request.num_computed_tokens`.

        Args:
            cached: Result of `find_cached_prefix` in this same step, on the first allocation of a request: its blocks
                are taken (reference counted) first, and the new tokens follow `cached.num_tokens`.
            num_lookahead_tokens: Further slots to reserve, for tokens drafted on the device.

        Returns:
            Per group, the blocks appended to the request's block table by this call (cached ones included on the first
            allocation; empty lists when the last block still had room; the null block where a state-space group
            keeps no state). Cross-attention groups get all their blocks, those of the encoder input, on the first
            allocation. Or None when there are not enough free blocks:
            then nothing was changed.
        """

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> int:
        """Make the whole blocks among the first `num_computed_tokens` *known* tokens findable.

        Called when these tokens' KV is certain to be computed by the steps already handed out. Idempotent.

        Returns:
            Number of computed tokens at which the next call is of use; calls before that change nothing.
        """

    def free(self, request: Request) -> None:
        """Drop the request's references; its cached blocks stay findable until they are evicted. Last blocks first
        become evictable, so that shared beginnings live longest. No-op for a request that holds nothing."""

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The request's block table per group, in the order of the tokens, of those that the encoder read in
        cross-attention groups. KeyError when it holds nothing."""

    def num_slots(self, request_id: str) -> int:
        """Tokens that fit in the blocks the request holds; 0 when it holds nothing."""

    def usage(self) -> KVCacheUsage: ...

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks. False, and no change, while any block is in use."""

    def take_events(self) -> list[KVCacheEvent]:
        """Events since the last call, in order of `sequence_number`; empty when events are switched off."""

    def explain_miss(self, request: Request) -> PrefixCacheMiss:
        """Why the request's cached prefix ends where it does; may be slow (only on demand)."""
