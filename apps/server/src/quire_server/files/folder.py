"""The folder of a server's files: their rows and contents, and the rows of batches.

Knows no route, and loads no web framework.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire_interfaces import ConfigError
from quire_server.batches.batch_store import BatchStore
from quire_server.config import ServerConfig
from quire_server.files.file_store import FileStore, open_database
from quire_server.sqlite_file import SQLiteFile

__all__ = ["KeptFiles", "check_files_dir", "open_files"]


@dataclass(slots=True)
class KeptFiles:
    """What is in the folder of a server's files."""

    folder: Path
    database: SQLiteFile
    files: FileStore
    batches: BatchStore

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self.database.close()


def open_files(config: ServerConfig, *, has_several_owners: bool) -> KeptFiles:
    """The configured folder, for a server that keeps files.

    Raises:
        ConfigError: it cannot be used.
    """
    assert config.files_dir is not None
    folder = Path(config.files_dir).expanduser()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot keep files in {config.files_dir!r}: {error.strerror}", field="files_dir") from None
    database = open_database(folder)
    total = config.files_max_total_bytes
    # A key that floods leaves half of the room to the others.
    own = total // 2 if has_several_owners else total
    files = FileStore(folder, database, max_total_bytes=total, max_owner_bytes=own)
    return KeptFiles(folder, database, files, BatchStore(database))


def check_files_dir(config: ServerConfig) -> None:
    """Whether the folder that was asked for can be used, before a request needs it.

    Raises:
        ConfigError: it cannot.
    """
    if config.files_dir is not None:
        open_files(config, has_several_owners=False).close()
