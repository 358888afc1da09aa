"""The settings of the KV cache. Knows no device and no model: how many blocks there are is the plan's business."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire_interfaces import Settings, at_least, one_of, setting

__all__ = ["HASH_ALGORITHMS", "MAX_BLOCK_SIZE", "KVCacheConfig"]

MAX_BLOCK_SIZE = 8192
HASH_ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
_BLOCK_SIZES = tuple(1 << power for power in range(MAX_BLOCK_SIZE.bit_length()))


def _power_of_two(value: Any) -> str | None:
    fine = isinstance(value, int) and not isinstance(value, bool) and value in _BLOCK_SIZES
    return None if fine else f"be a power of two from 1 to {MAX_BLOCK_SIZE} (16 suits most models)"


def _boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else "be true or false"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig(Settings):
    """Settings of the KV cache.

    Raises:
        ConfigError: a value is not possible; the message names the field, the value and what it must be.
    """

    block_size: int = setting(
        16,
        help="Token slots in a block: the unit in which KV memory is given out and prefixes are shared. Models with "
        "recurrent layers get larger ones where their states need them.",
        unit="tokens",
        check=_power_of_two,
        flag="--block-size",
    )
    enable_prefix_caching: bool = setting(
        True,
        help="Keep computed blocks findable, so that requests that begin alike compute their beginning once.",
        check=_boolean,
        flag="--enable-prefix-caching",
    )
    prefix_caching_hash_algo: str = setting(
        "sha256",
        help="Hash of block contents. sha256 resists collisions. xxhash is faster but does not: who can choose "
        "prompts could build two that share a hash and read answers made from another's cache, so use it only when "
        "all tenants trust each other. The _cbor forms hash a canonical CBOR encoding, for readers in other languages.",
        check=one_of(*HASH_ALGORITHMS),
        flag="--prefix-caching-hash-algo",
    )
    enable_kv_cache_events: bool = setting(
        False,
        help="Record which blocks become findable and which are evicted, for prefix-aware routers.",
        check=_boolean,
        flag="--enable-kv-cache-events",
    )
    kv_cache_event_buffer_size: int = setting(
        10_000,
        help="Events kept for reading and replay; older ones are dropped, which their numbers show.",
        unit="events",
        check=at_least(1),
        flag="--kv-cache-event-buffer-size",
    )
