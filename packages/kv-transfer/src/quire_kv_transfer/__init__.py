"""Tiers behind the KV cache: whole prefix blocks in host memory and on disk, read back instead of computed.

Knows block hashes, bytes and files; no tensors, no tokens, no requests.
"""

from __future__ import annotations

from quire_kv_transfer.block_file import read_block, write_block
from quire_kv_transfer.block_files import BlockFiles
from quire_kv_transfer.block_frame import BlockFormatError, check_frame, frame_header
from quire_kv_transfer.block_store import BlockStore, StoreTenant
from quire_kv_transfer.block_tier import BlockTier
from quire_kv_transfer.config import KVTransferConfig
from quire_kv_transfer.connected_worker import ConnectedWorker
from quire_kv_transfer.connector_config import ConnectorConfig, ConnectorContext
from quire_kv_transfer.connectors import ENTRY_POINTS, OpenConnectors, check_connector, open_connectors
from quire_kv_transfer.disk_tier import DiskTier, group_block_bytes
from quire_kv_transfer.encoder_cache import DiskEncoderCache
from quire_kv_transfer.fingerprint import layout_facts, model_fingerprint, weights_digest
from quire_kv_transfer.folder import TierFolder, prepare_folder
from quire_kv_transfer.host_memory import HostMemoryTier
from quire_kv_transfer.pull_connector import PullConnector
from quire_kv_transfer.rank_reports import RankReports
from quire_kv_transfer.remote_tier import RemoteTier
from quire_kv_transfer.store_server import BlockStoreServer
from quire_kv_transfer.store_wire import parse_address
from quire_kv_transfer.tier_connector import TierConnector
from quire_kv_transfer.tier_stack import MAX_DEVICE_STORE_BYTES, MAX_STORE_BYTES, TierStack
from quire_kv_transfer.tier_worker import TierWorker
from quire_kv_transfer.usage import FolderUsage

__version__ = "0.1.0"

__all__ = [
    "ENTRY_POINTS",
    "MAX_DEVICE_STORE_BYTES",
    "MAX_STORE_BYTES",
    "BlockFiles",
    "BlockFormatError",
    "BlockStore",
    "BlockStoreServer",
    "BlockTier",
    "ConnectedWorker",
    "ConnectorConfig",
    "ConnectorContext",
    "DiskEncoderCache",
    "DiskTier",
    "FolderUsage",
    "HostMemoryTier",
    "KVTransferConfig",
    "OpenConnectors",
    "PullConnector",
    "RankReports",
    "RemoteTier",
    "StoreTenant",
    "TierConnector",
    "TierFolder",
    "TierStack",
    "TierWorker",
    "check_connector",
    "check_frame",
    "frame_header",
    "group_block_bytes",
    "layout_facts",
    "model_fingerprint",
    "open_connectors",
    "parse_address",
    "prepare_folder",
    "read_block",
    "weights_digest",
    "write_block",
]
