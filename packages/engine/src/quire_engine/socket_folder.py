"""Folders of unix sockets that outlive no process for long: where one was killed, the next one clears up.

A folder is its process's for as long as that holds the lock on a file in it, which the system releases when the process
ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

__all__ = ["SocketFolder"]

PREFIX = "quire-io-"
LOCK = "lock"
UNLOCKED_S = 60.0
"""A folder without a lock is somebody's who is about to make it, for so long."""
MOST_PATH_BYTES = 107
"""Of a socket; Linux has room for so many, without the null byte."""


class SocketFolder:
    """A new folder that only this user can read. Making one removes those of processes that have ended.

    Args:
        longest_name: Longest name of a socket in it, in characters.
    """

    def __init__(self, *, longest_name: int) -> None:
        places = {tempfile.gettempdir(), "/tmp"}
        for place in places:
            _remove_abandoned(Path(place))
        path = tempfile.mkdtemp(prefix=PREFIX)
        if len(os.fsencode(path)) + 1 + longest_name > MOST_PATH_BYTES:
            os.rmdir(path)
            path = tempfile.mkdtemp(prefix=PREFIX, dir="/tmp")
        self.path = path
        # Others see the file under its name only once it is locked.
        self._lock = os.open(f"{path}/.{LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(f"{path}/.{LOCK}", f"{path}/{LOCK}")

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _remove_abandoned(place: Path) -> None:
    """Remove this user's folders in `place` whose lock nobody holds."""
    for folder in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, gone meanwhile, or locked: in use
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            if not (folder / LOCK).exists() and time.time() - folder.stat().st_mtime > UNLOCKED_S:
                shutil.rmtree(folder, ignore_errors=True)  # ended while it made the folder
                continue
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
