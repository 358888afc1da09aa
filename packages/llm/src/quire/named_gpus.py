"""GPUs that can be planned for without having one: by name, or by how much memory they have. Free of torch."""

from __future__ import annotations

import difflib
import re

from quire_interfaces import ConfigError

__all__ = ["MEMORY_MIB", "RESERVED_MIB", "named_gpu_bytes"]

MEMORY_MIB = {
    "a10": 23028,
    "a100-40": 40960,
    "a100-80": 81920,
    "a6000": 49140,
    "b200": 183359,
    "h100": 81559,
    "h20": 97871,
    "h200": 143771,
    "l4": 23034,
    "l40s": 46068,
    "mi210": 65520,
    "mi250x": 65520,
    "mi300x": 196592,
    "mi325x": 262128,
    "mi355x": 294896,
    "rtx-3090": 24576,
    "rtx-4090": 24564,
    "rtx-5090": 32607,
    "rx-7900-xtx": 24560,
}
"""Name -> memory as nvidia-smi or amd-smi report it; of mi250x, that of one of its two dies, each a GPU of its own."""
RESERVED_MIB = 1024
"""What the driver and its libraries take before anything is allocated: more than was seen, rather than less."""


def named_gpu_bytes(device: str) -> int | None:
    """Memory that a GPU would have free, of a device that is written "cuda:NAME", "rocm:NAME" or "cuda:24GiB"; None
    where the device is one of this machine ("cuda", "cuda:1", "cpu").

    Raises:
        ConfigError: there is no such name; the message lists them.
    """
    kind, _, name = device.lower().partition(":")
    if kind not in ("cuda", "rocm") or not name or name.isdigit():
        return None
    if size := re.fullmatch(r"(\d+(?:\.\d+)?)gib", name):
        total_mib = int(float(size[1]) * 1024)
    elif name in MEMORY_MIB:
        total_mib = MEMORY_MIB[name]
    else:
        near = difflib.get_close_matches(name, MEMORY_MIB, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; the names are {', '.join(MEMORY_MIB)}"
        raise ConfigError(
            f"nothing is known about a GPU called {name!r}{hint}; or say how much memory it has: cuda:48GiB",
            field="device",
        )
    if total_mib <= RESERVED_MIB:
        raise ConfigError(
            f"a GPU of {name} has no room for anything: its driver takes {RESERVED_MIB} MiB", field="device"
        )
    return (total_mib - RESERVED_MIB) << 20
