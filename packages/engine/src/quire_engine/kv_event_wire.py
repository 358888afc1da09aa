"""KV cache events as vLLM's subscribers read them: one msgpack array per batch, a tagged map per event.

    [seconds since the epoch, [event, ...], data parallel rank]
    {"type": "BlockStored", "block_hashes": [...], "parent_block_hash": ..., "token_ids": [...], "block_size": 16, ...}

The form is that of vLLM 0.29 and later; earlier ones had arrays for events, too. Hashes are sent whole, as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire_interfaces import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheEvent,
    KVCacheGroup,
    KVCacheSpec,
    LatentAttentionSpec,
    MambaSpec,
    SlidingLatentSpec,
    SlidingWindowSpec,
)

__all__ = ["MEDIUM_DEVICE", "WireBatch", "WireBlockRemoved", "WireBlockStored", "WireBlocksCleared", "wire_events"]

MEDIUM_DEVICE = "GPU"
"""The KV cache that the network reads, whatever the device: subscribers know it by this word."""

_KINDS: tuple[tuple[type[KVCacheSpec], str], ...] = (
    (SlidingWindowSpec, "sliding_window"),
    (SlidingLatentSpec, "sliding_window"),
    (ChunkedLocalSpec, "chunked_local_attention"),
    (CrossAttentionSpec, "cross_attention"),
    (FullAttentionSpec, "full_attention"),
    (LatentAttentionSpec, "mla_attention"),
    (MambaSpec, "mamba"),
)
"""Subclasses before their bases."""


class WireBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """Events of one step."""

    ts: float
    """Seconds since the epoch."""
    events: list[Any]
    data_parallel_rank: int | None = None


class WireBlockStored(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    """Blocks that became findable, each the parent of the next."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    """Always None: adapters are known by their names."""
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class WireBlockRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    """Blocks that are no longer findable."""

    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class WireBlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    """No block is findable any more."""


WireEvent = WireBlockStored | WireBlockRemoved | WireBlocksCleared


def wire_events(events: Sequence[KVCacheEvent], groups: Sequence[KVCacheGroup]) -> list[WireEvent]:
    """Events in the wire's form.

    Args:
        events: From the KV cache, in their order.
        groups: KV cache groups, which say what kind of layer a block is of.
    """
    return [_wire_event(event, groups) for event in events]


def _wire_event(event: KVCacheEvent, groups: Sequence[KVCacheGroup]) -> WireEvent:
    if isinstance(event, BlockStored):
        spec = groups[event.group].spec
        return WireBlockStored(
            block_hashes=event.block_hashes,
            parent_block_hash=event.parent_block_hash,
            token_ids=event.token_ids,
            block_size=event.block_size,
            lora_id=None,
            medium=MEDIUM_DEVICE,
            lora_name=event.lora_name,
            extra_keys=event.extra_keys if any(event.extra_keys) else None,
            group_idx=event.group,
            kv_cache_spec_kind=next((kind for base, kind in _KINDS if isinstance(spec, base)), "unknown"),
            kv_cache_spec_sliding_window=getattr(spec, "sliding_window", None),
        )
    if isinstance(event, BlockRemoved):
        return WireBlockRemoved(block_hashes=event.block_hashes, medium=MEDIUM_DEVICE, group_idx=event.group)
    assert isinstance(event, AllBlocksCleared)
    return WireBlocksCleared()
