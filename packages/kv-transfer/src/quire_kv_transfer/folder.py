"""Names of block files in a tier's folder, and whether the folder can be used at all.

    FOLDER/weights/<stat of the files>           digests of weight files (`fingerprint`)
    FOLDER/<fingerprint>/<ab>/<block hash>-<group>.kv
    FOLDER/<fingerprint of the towers>/<ab>/<hash of an item's key>-<0: embeddings, 1: description>.kv

The folder is the index: whether the tier has a block is a question to the file system. So nothing has to be read at
the start, and engines that share a folder see each other's blocks at once.
"""

from __future__ import annotations

import logging
import os
import tempfile

from quire_interfaces import BlockKey, ConfigError

__all__ = ["TierFolder", "prepare_folder", "warn_switched_off"]

_logger = logging.getLogger(__name__)


def prepare_folder(path: str) -> str:
    """Make the folder if it is not there, and try whether it takes a file.

    Returns:
        Its absolute path.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    root = os.path.abspath(os.path.expanduser(path))
    try:
        os.makedirs(root, mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=root) as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        raise ConfigError(
            f"kv_disk_path is {path!r}, where no files can be written ({error.strerror or error}); "
            "choose another folder, or give this user the right to write there",
            field="kv_disk_path",
        ) from None
    return root


class TierFolder:
    """The block files of one model in a folder.

    Args:
        root: As from `prepare_folder`.
        fingerprint: 32 bytes that tell this model's blocks from all others.
    """

    def __init__(self, root: str, fingerprint: bytes) -> None:
        self.root = root
        self.fingerprint = fingerprint
        self._prefix = os.path.join(root, fingerprint.hex()[:16])

    def path(self, key: BlockKey) -> str:
        """Where this block's file is, if there is one."""
        name = key.block_hash.hex()
        return f"{self._prefix}/{name[:2]}/{name}-{key.group}.kv"

    def has(self, key: BlockKey) -> bool:
        """Whether there is a file for this block."""
        return os.path.exists(self.path(key))


def warn_switched_off(name: str, error: Exception) -> None:
    """Say that a tier takes and gives nothing any more."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    _logger.warning(
        "the %s is switched off until the next start (%s); make room or repair it. Requests go on without it",
        name,
        reason,
    )
