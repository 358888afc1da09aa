"""Memory of the system under tensors: pages of mapped files that have been read for the last time, and others.

A mapped file costs memory as it is read, and weights that are converted as they are loaded are read once: without
giving pages back, a model of 4 bits would be shown with the memory of its file in 16 bits as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = ["MappedPages", "discard_pages"]

KEPT_BYTES = 128 << 20
"""Pages that may be there before they are looked for, which takes some 20 ms."""
KEPT_SHARE = 32
"""Or this part of the files, so that files of any size are gone through as often."""

_IS_LINUX = sys.platform.startswith("linux")


def discard_pages(address: int, num_bytes: int) -> int:
    """Have the system take back the pages that lie in this memory as a whole. Touched again, they are what the mapped
    file has, or zeros where there is none (Linux).

    Returns:
        Bytes of these pages; those that were never touched count, too.

    Raises:
        OSError: the system refused.
    """
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    if length <= 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_DONTNEED) != 0:
        raise OSError(ctypes.get_errno(), "the system did not take the memory back")
    return length


class MappedPages:
    """Pages of files that this process has mapped, while their tensors are read one after another.

    Tensors stay what they are: what is read again comes from the file. Memory that was written to
    since it was mapped is left alone, as is everything where the system is not Linux.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        paths = [file.resolve() for file in files]
        self._paths = {os.fspath(path) for path in paths}
        self._kept_bytes = max(KEPT_BYTES, sum(path.stat().st_size for path in paths) // KEPT_SHARE)
        # What somebody else has mapped, who may be about to write to it, is not touched.
        self._others = {None, *map(self._place, _lines("/proc/self/maps"))}
        self._before = _resident_file_bytes()

    def trim(self) -> None:
        """Give back the files' pages if there are many by now. Costs microseconds if not."""
        if _resident_file_bytes() - self._before <= self._kept_bytes:
            return
        place = None
        for line in _lines("/proc/self/smaps"):  # as in maps, each line with more about this mapping below
            name, *numbers = line.split()
            if not name.endswith(":"):
                place = self._place(line)
            elif name == "Anonymous:" and place not in self._others and numbers[0] == "0":  # none was written to
                assert place is not None
                with contextlib.suppress(OSError):  # locked in memory
                    discard_pages(place[0], place[1] - place[0])
        self._before = _resident_file_bytes()

    def _place(self, line: str) -> tuple[int, int] | None:
        """Begin and end of what a line of /proc/self/maps tells of, if it is one of these files."""
        parts = line.split(maxsplit=5)
        if parts[5:] and parts[5] in self._paths:
            begin, end = parts[0].split("-")
            return int(begin, 16), int(end, 16)
        return None


def _lines(path: str) -> list[str]:
    """Of a file about this process; none where the system says nothing."""
    try:
        return Path(path).read_text(errors="replace").splitlines() if _IS_LINUX else []
    except OSError:
        return []


def _resident_file_bytes() -> int:
    """Of all files that this process has mapped; 0 where the system says nothing."""
    return sum(int(line.split()[2]) for line in _lines("/proc/self/statm")) * mmap.PAGESIZE
