"""How much memory a device has to give now: an accelerator's own, the machine's, or what a control group leaves of it.

Free of torch, except where a platform asks it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from quire_interfaces import ConfigError
from quire_interfaces.platforms import platform_of

__all__ = ["available_memory_bytes", "control_group_bytes"]


def available_memory_bytes(device: str = "cpu") -> int:
    """Memory of a device, as --device names it, that new allocations can take now: its own
    (`Platform.free_bytes`), or the machine's, or the control group's where that is less.

    Raises:
        ConfigError: the system does not say; give --kv-cache-memory-bytes then. Or there is no such device.
    """
    if (own_bytes := platform_of(device).free_bytes(device)) is not None:
        return own_bytes
    sizes = control_group_bytes()
    with contextlib.suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    if not sizes:
        sizes = _sysconf_bytes()
    if not sizes:
        raise ConfigError("cannot tell how much memory is free; give --kv-cache-memory-bytes")
    return max(0, min(sizes))


def control_group_bytes(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> list[int]:
    """What is left of the memory limits of this process's control groups, one number for each that has a limit. Pages
    of files that are not in use count as left: the kernel takes them back first.

    Args:
        root: Where control groups are mounted, of version 2 or (in a folder `memory`) 1.
        membership: File with the groups of this process.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    sizes_left = []
    for line in lines or ["0::/"]:
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0":
            names = ("memory.max", "memory.current", "inactive_file ")
            groups = _with_parents(root, path)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")
            groups = _with_parents(root / "memory", path)
        else:
            continue
        sizes_left += [size for group in groups if (size := _left(group, *names)) is not None]
    return sizes_left


def _with_parents(mount: Path, path: str) -> Iterator[Path]:
    """Folders of a group and of those around it; in a container, only the mount itself may be there."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for count in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:count])


def _left(group: Path, limit_name: str, usage_name: str, cached_name: str) -> int | None:
    """Bytes that are left in a group; None where it sets no limit."""
    try:
        limit = int((group / limit_name).read_text())
        used = int((group / usage_name).read_text())
    except (OSError, ValueError):  # "max" is no number
        return None
    if limit >= 1 << 60:  # version 1 writes no limit as a number that is larger than any memory
        return None
    cached = 0
    with contextlib.suppress(OSError, ValueError):
        lines = (group / "memory.stat").read_text().splitlines()
        cached = sum(int(line.split()[1]) for line in lines if line.startswith(cached_name))
    return limit - max(0, used - cached)


def _sysconf_bytes() -> list[int]:
    try:
        return [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2]
    except (AttributeError, ValueError, OSError):
        return []
