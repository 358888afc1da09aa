"""A tier in a Mooncake store: blocks of a fleet in the memory of its machines, found by their content hashes.

Uses the documented interface of the package `mooncake-transfer-engine` (`mooncake.store.MooncakeDistributedStore`). Its
binaries need libibverbs and the CUDA runtime also where TCP is the protocol, so they cannot be imported everywhere.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Sequence
from typing import Any

from quire_interfaces import BlockKey, ConfigError
from quire_kv_transfer.block_frame import BlockFormatError
from quire_kv_transfer.connector_config import ConnectorContext

__all__ = ["MooncakeTier", "mooncake_store_connector"]

_logger = logging.getLogger(__name__)

MAX_KNOWN_KEYS = 1_000_000
DEFAULTS: dict[str, Any] = {
    "local_hostname": "127.0.0.1",
    "metadata_server": "P2PHANDSHAKE",
    "global_segment_size": 3 << 30,
    "local_buffer_size": 1 << 30,
    "protocol": "tcp",
    "device_name": "",
    "master_server_address": "127.0.0.1:50051",
}


class MooncakeTier:
    """Implements `BlockTier`.

    Args:
        store: A `MooncakeDistributedStore` that is set up; closed with this.
        prefix: What the names of this engine's blocks begin with; those of other models have others.
    """

    name = "Mooncake store"

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._known: dict[BlockKey, None] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def _name(self, key: BlockKey) -> str:
        return f"{self._prefix}/{key.group}/{key.block_hash.hex()}"

    def has(self, key: BlockKey) -> bool:
        """Whether the store said so, or took it."""
        return key in self._known

    def look_up(self, keys: Sequence[BlockKey]) -> None:
        """Ask for the keys that are not known, in one question."""
        unknown = [key for key in keys if key not in self._known]
        if unknown:
            answers = self._store.batch_is_exist([self._name(key) for key in unknown])
            self._note([key for key, answer in zip(unknown, answers, strict=True) if answer == 1])

    def _note(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            self._known.update(dict.fromkeys(keys))
            while len(self._known) > MAX_KNOWN_KEYS:
                del self._known[next(iter(self._known))]

    def expect(self, key: BlockKey) -> None:
        """Nothing: the store has no use for it."""

    def load(self, key: BlockKey, buffers: Sequence[memoryview]) -> bool:
        """Get a frame. Raises BlockFormatError when it has another length."""
        frame = memoryview(self._store.get(self._name(key)))
        if not len(frame):
            self._known.pop(key, None)
            return False
        num_bytes = sum(map(len, buffers))
        if len(frame) != num_bytes:
            raise BlockFormatError(f"it has {len(frame)} bytes and should have {num_bytes}")
        start = 0
        for buffer in buffers:
            buffer[:] = frame[start : start + len(buffer)]
            start += len(buffer)
        return True

    def store(self, key: BlockKey, buffers: Sequence[bytes | memoryview]) -> bool:
        """Put a frame; whether the store took it."""
        if self._store.put(self._name(key), b"".join(buffers)) != 0:
            return False
        self._note([key])
        return True

    def discard(self, key: BlockKey) -> None:
        """Have the store drop a frame."""
        self._known.pop(key, None)
        self._store.remove(self._name(key))

    def close(self) -> None:
        """Leave the store."""
        if not self._is_closed:
            self._is_closed = True
            self._store.close()


def mooncake_store_connector(context: ConnectorContext) -> MooncakeTier:
    """`MooncakeStoreConnector`. Raises ConfigError."""
    config = context.config
    config.check_extra(DEFAULTS)
    values = {**DEFAULTS, **config.kv_connector_extra_config}
    try:
        store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    except ImportError as error:
        raise ConfigError(
            f"kv_transfer_config: MooncakeStoreConnector needs the package mooncake-transfer-engine and the libraries "
            f"that it links ({error}); `quire kv-serve` with --kv-tier needs none",
            field="kv_transfer_config",
        ) from error
    status = store.setup(*(values[name] for name in DEFAULTS))
    if status != 0:
        raise ConfigError(
            f"kv_transfer_config: the Mooncake store at {values['master_server_address']} cannot be joined (status "
            f"{status}); start mooncake_master there, or mend kv_connector_extra_config",
            field="kv_transfer_config",
        )
    return MooncakeTier(store, context.fingerprint.hex())
