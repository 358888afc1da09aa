"""A tier behind the KV cache: whole prefix blocks on disk, read back instead of computed, over restarts too.

Knows block hashes, bytes and files; no tensors, no tokens, no requests.
"""

from __future__ import annotations

from quire_kv_transfer.block_file import BlockFileError, read_block, write_block
from quire_kv_transfer.config import KVTransferConfig
from quire_kv_transfer.disk_connector import DiskConnector
from quire_kv_transfer.disk_tier import MAX_STORE_BYTES, DiskTier, group_block_bytes
from quire_kv_transfer.disk_worker import DiskWorker
from quire_kv_transfer.encoder_cache import DiskEncoderCache
from quire_kv_transfer.fingerprint import layout_facts, model_fingerprint, weights_digest
from quire_kv_transfer.folder import TierFolder, prepare_folder
from quire_kv_transfer.usage import FolderUsage

__version__ = "0.1.0"

__all__ = [
    "MAX_STORE_BYTES",
    "BlockFileError",
    "DiskConnector",
    "DiskEncoderCache",
    "DiskTier",
    "DiskWorker",
    "FolderUsage",
    "KVTransferConfig",
    "TierFolder",
    "group_block_bytes",
    "layout_facts",
    "model_fingerprint",
    "prepare_folder",
    "read_block",
    "weights_digest",
    "write_block",
]
