"""`quire kv-serve`: a block store that engines share (`quire_kv_transfer.store_server`). Loads no model."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.plan import format_bytes
from quire.setting_text import parse_whole_number
from quire_interfaces import ConfigError
from quire_kv_transfer import BlockStore, BlockStoreServer, StoreTenant

__all__ = ["kv_serve", "read_tenants"]


def kv_serve(
    addresses: Sequence[str], *, memory: str, disk_path: str | None, disk_size: str | None, tenants: str | None
) -> int:
    """Serve until SIGTERM or SIGINT; the exit status.

    Args:
        addresses: "unix:/path" or "tcp://host:port", at least one.
        memory: Host memory of the one tenant where no file names several.
        disk_path: Folder for blocks; None for memory only.
        disk_size: Disk of the one tenant.
        tenants: JSON file of `read_tenants`.

    Raises:
        ConfigError: settings that cannot be.
    """
    if tenants is not None:
        named = read_tenants(Path(tenants))
    else:
        disk_bytes = 0 if disk_size is None else _size(disk_size, "--disk-size")
        named = [StoreTenant(name="default", memory_bytes=_size(memory, "--memory"), disk_bytes=disk_bytes)]
    wants_disk = any(tenant.disk_bytes for tenant in named)
    if wants_disk != (disk_path is not None):
        raise ConfigError("--disk-path and the sizes of disk go together; give both, or neither", field="disk_path")
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    server = BlockStoreServer(BlockStore(named, disk_path), addresses)
    server.start()
    for address in server.addresses:
        print(f"block store: {address}", flush=True)
    for tenant in named:
        print(
            f"tenant {tenant.name}: {format_bytes(tenant.memory_bytes)} of memory, "
            f"{format_bytes(tenant.disk_bytes)} of disk, {'with a key' if tenant.api_key else 'no key'}",
            flush=True,
        )
    stopped.wait()
    server.close()
    return 0


def read_tenants(path: Path) -> list[StoreTenant]:
    """Tenants from a JSON file: `{"NAME": {"key": "...", "memory": "4GiB", "disk": "100GiB"}}`.

    Raises:
        ConfigError: it is no such file.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the tenants in {path} cannot be read: {error}", field="tenants") from None
    if not isinstance(data, dict) or not data:
        raise ConfigError(f"{path} must be an object with a member for each tenant", field="tenants")
    return [_tenant(name, value, path) for name, value in data.items()]


def _tenant(name: str, value: Any, path: Path) -> StoreTenant:
    if not isinstance(value, Mapping) or not {"key", "memory"} <= value.keys() <= {"key", "memory", "disk"}:
        raise ConfigError(f"{path}: {name!r} needs a key and memory, and may have disk; nothing else", field="tenants")
    key, disk = value["key"], value.get("disk", 0)
    if not isinstance(key, str) or not key:
        raise ConfigError(f"{path}: the key of {name!r} must be a text that is not empty", field="tenants")
    return StoreTenant(
        name=name,
        api_key=key,
        memory_bytes=_size(value["memory"], f"{name}: memory"),
        disk_bytes=_size(disk, f"{name}: disk"),
    )


def _size(value: Any, name: str) -> int:
    """Bytes of a size, which may be written with a suffix."""
    try:
        size = value if isinstance(value, int) and not isinstance(value, bool) else parse_whole_number(str(value))
    except ValueError:
        size = -1
    if size < 0:
        raise ConfigError(f"{name} must be a size, such as 512MB or 8GiB, got {value!r}", field=name)
    return size
