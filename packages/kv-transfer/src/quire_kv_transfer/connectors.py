"""Connectors by name: Quire's own, those of other packages, and several at once.

A connector is one of two things: a `BlockTier`, which keeps blocks under their content hashes and joins the stack of
tiers, or a `RequestConnector`, which knows requests. What makes one is a callable that takes a `ConnectorContext`.
Other packages name theirs as entry points of the group `quire.kv_connectors`, or are named by
`kv_connector_module_path`.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from quire_interfaces import ConfigError, RequestConnector
from quire_interfaces.plugins import installed_plugins, not_allowed_hint
from quire_kv_transfer.block_files import BlockFiles
from quire_kv_transfer.block_tier import BlockTier
from quire_kv_transfer.connector_config import ConnectorConfig, ConnectorContext
from quire_kv_transfer.disk_tier import DiskTier
from quire_kv_transfer.host_memory import HostMemoryTier
from quire_kv_transfer.mooncake_tier import mooncake_store_connector
from quire_kv_transfer.pull_connector import nixl_connector, socket_connector

__all__ = ["ENTRY_POINTS", "Connector", "OpenConnectors", "check_connector", "open_connectors"]

ENTRY_POINTS = "quire.kv_connectors"
"""Group of the entry points of other packages' connectors."""

Connector = BlockTier | RequestConnector
MakeConnector = Callable[[ConnectorContext], Connector]


@dataclass(slots=True)
class OpenConnectors:
    """What a configuration asks for."""

    tiers: list[BlockTier] = field(default_factory=list)
    """Fastest first, as they were named."""
    connector: RequestConnector | None = None


def _offloading(context: ConnectorContext) -> HostMemoryTier:
    """`OffloadingConnector`: host memory for blocks that the KV cache has no room for."""
    config = context.config
    config.check_extra({"cpu_bytes_to_use", "num_cpu_blocks", "block_size", "spec_name"})
    num_bytes = config.extra("cpu_bytes_to_use", 0) or config.extra("num_cpu_blocks", 0) * sum(context.block_bytes)
    if not num_bytes:
        raise _error("OffloadingConnector needs kv_connector_extra_config.cpu_bytes_to_use, bytes of host memory")
    return HostMemoryTier(int(num_bytes))


def _shared_storage(context: ConnectorContext) -> BlockFiles:
    """`SharedStorageConnector` and `ExampleConnector`: files in a folder that engines share."""
    config = context.config
    config.check_extra({"shared_storage_path", "size_bytes"})
    path = config.kv_connector_extra_config.get("shared_storage_path")
    if not isinstance(path, str) or not path:
        raise _error(f"{config.kv_connector} needs kv_connector_extra_config.shared_storage_path, a folder")
    size_bytes = int(config.extra("size_bytes", 0)) or None
    return DiskTier(path, context.fingerprint, context.block_bytes, size_bytes=size_bytes).files


INSTEAD: Mapping[str, str] = {
    "LMCacheConnectorV1": "LMCache's engine is one of tensors and CUDA streams, and starts only with a compute "
    "backend of its own; MooncakeStoreConnector, or `quire kv-serve` with --kv-tier, is a store for a fleet",
    "LMCacheMPConnector": "its server owns memory of GPUs; `quire kv-serve` with --kv-tier is a store for a fleet",
    "MooncakeConnector": "its transfer engine needs the CUDA runtime; NixlConnector reads from engine to engine, "
    "and MooncakeStoreConnector joins a Mooncake store",
    "P2pNcclConnector": "NCCL sends from GPU to GPU; NixlConnector reads from engine to engine",
}
"""Names of vLLM's connectors that are not here: why, and what to take."""

BUILT_IN: Mapping[str, MakeConnector] = {
    "NixlConnector": nixl_connector,
    "SocketConnector": socket_connector,
    "OffloadingConnector": _offloading,
    "SharedStorageConnector": _shared_storage,
    "ExampleConnector": _shared_storage,
    "MooncakeStoreConnector": mooncake_store_connector,
}


def check_connector(config: ConnectorConfig) -> None:
    """Raises ConfigError for a connector that there is not."""
    for each in _flattened(config):
        _find(each)


def _flattened(config: ConnectorConfig) -> list[ConnectorConfig]:
    """The connector itself, or those that `MultiConnector` puts together."""
    if config.kv_connector is None:
        return []
    if config.kv_connector != "MultiConnector":
        return [config]
    members = config.kv_connector_extra_config.get("connectors")
    if not (isinstance(members, list) and members and all(isinstance(each, Mapping) for each in members)):
        raise _error("MultiConnector needs kv_connector_extra_config.connectors, a list of objects such as this one")
    common = {
        "kv_role": config.kv_role,
        "engine_id": config.engine_id,
        "kv_ip": config.kv_ip,
        "kv_port": config.kv_port,
    }
    return [one for each in members for one in _flattened(ConnectorConfig.of({**common, **each}))]


def _find(config: ConnectorConfig) -> MakeConnector:
    name = config.kv_connector or ""
    if config.kv_connector_module_path is not None:
        try:
            make: MakeConnector = getattr(importlib.import_module(config.kv_connector_module_path), name)
        except (ImportError, AttributeError) as error:
            raise _error(f"there is no {name} in kv_connector_module_path: {error}") from error
        return make
    if name in BUILT_IN:
        return BUILT_IN[name]
    plugins = installed_plugins(ENTRY_POINTS)
    if name in plugins:
        loaded: MakeConnector = plugins[name].load(field="kv_transfer_config")
        return loaded
    if name in INSTEAD:
        raise _error(f"there is no {name}: {INSTEAD[name]}")
    names = sorted({*BUILT_IN, "MultiConnector", *plugins})
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(names)}"
    raise _error(f"there is no kv_connector {name!r}; {hint}{not_allowed_hint(ENTRY_POINTS, name)}")


def open_connectors(context: ConnectorContext) -> OpenConnectors:
    """Make the connectors of a configuration.

    Raises:
        ConfigError: one cannot be made, or more than one knows requests.
    """
    opened = OpenConnectors()
    for config in _flattened(context.config):
        made: Any = _find(config)(dataclasses.replace(context, config=config))
        if _knows_requests(made):
            if opened.connector is not None:
                raise _error(f"{config.kv_connector} knows requests, as another one does; take one of them")
            opened.connector = made
        else:
            opened.tiers.append(made)
    return opened


def _knows_requests(made: Any) -> TypeGuard[RequestConnector]:
    return hasattr(made, "get_num_new_matched_tokens")


def _error(what: str) -> ConfigError:
    return ConfigError(f"kv_transfer_config: {what}", field="kv_transfer_config")
