"""Settings say what they must be."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from quire_interfaces import ConfigError
from quire_kv_cache import KVCacheConfig


def test_defaults() -> None:
    config = KVCacheConfig()
    assert config.block_size == 16
    assert config.enable_prefix_caching
    assert config.prefix_caching_hash_algo == "sha256"
    assert not config.enable_kv_cache_events


@pytest.mark.parametrize("block_size", [1, 2, 16, 256, 8192])
def test_possible_block_sizes(block_size: int) -> None:
    assert KVCacheConfig(block_size=block_size).block_size == block_size


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("block_size", value) for value in (0, -16, 3, 17, 16384, 16.0, "16", True)),
        *(("prefix_caching_hash_algo", value) for value in ("md5", "SHA256", "", 1)),
        *(("enable_prefix_caching", value) for value in ("yes", 1)),
        ("enable_kv_cache_events", "no"),
        *(("kv_cache_event_buffer_size", value) for value in (0, -1, True, "many")),
    ],
)
def test_impossible_values_are_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        KVCacheConfig(**{field: value})
    assert error.value.field == field
    assert field in str(error.value)
    assert repr(value) in str(error.value)


def test_every_field_explains_itself() -> None:
    flags = {}
    for field in dataclasses.fields(KVCacheConfig):
        assert field.metadata["help"].endswith(".")
        flags[field.name] = field.metadata["flag"]
    assert flags["block_size"] == "--block-size"
    assert flags["enable_prefix_caching"] == "--enable-prefix-caching"
    assert flags["prefix_caching_hash_algo"] == "--prefix-caching-hash-algo"
