"""What another process prints, as records in the log of this one. Knows no process."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from typing import TextIO

__all__ = ["log_pipe"]


@contextlib.contextmanager
def log_pipe(logger: logging.Logger, process: str) -> Iterator[TextIO]:
    """A file for the standard error of another process: each line is logged at the level info.

    Args:
        logger: Gets the records.
        process: What to call the process in them.

    Raises:
        OSError: there is no file descriptor left.
    """
    read_fd, write_fd = os.pipe()
    threading.Thread(target=_log_lines, args=(read_fd, logger, process), name="quire-log-pipe", daemon=True).start()
    with open(write_fd, "w", encoding="utf-8") as file:
        yield file


def _log_lines(read_fd: int, logger: logging.Logger, process: str) -> None:
    """Ends when the last process that may write has ended."""
    with open(read_fd, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.strip() and logger.isEnabledFor(logging.INFO):
                record = logger.makeRecord(logger.name, logging.INFO, "", 0, line.rstrip(), (), None)
                record.processName = process
                logger.handle(record)
