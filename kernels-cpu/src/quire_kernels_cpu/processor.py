"""Which builds of the kernels this machine's processor runs.

Knows what Linux tells about processors; does not know compilers or libraries. Standard library only: `hatch_build.py`
imports this before the package is installed.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

__all__ = ["BUILDS", "processor_flags", "supported_builds"]

BUILDS: dict[str, frozenset[str]] = {
    "amx": frozenset(
        {
            "avx512f",
            "avx512bw",
            "avx512vl",
            "avx512dq",
            "avx512_bf16",
            "avx512_vnni",
            "avx512vbmi",
            "amx_tile",
            "amx_bf16",
            "amx_int8",
        }
    ),
    "avx512bf16": frozenset(
        {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx512_bf16", "avx512_vnni", "avx512vbmi"}
    ),
    "avx512vnni": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx512_vnni"}),
    "avx512": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}),
    "avx2": frozenset({"avx2", "fma", "f16c", "bmi2"}),
    "sve": frozenset({"sve", "sve of 256 bits"}),
    "neon": frozenset({"asimd"}),
}
"""Build -> the processor flags it needs, the best first; "sve" and "neon" for 64-bit Arm, the others for x86-64."""


@cache
def processor_flags() -> frozenset[str]:
    """Instruction sets of this processor, as /proc/cpuinfo names them; empty where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    listed = (line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features")))
    flags = frozenset(next(listed, []))
    return flags | {f"sve of {_sve_bits()} bits"} if "sve" in flags else flags


def _sve_bits() -> int:
    """The width of this processor's SVE vectors, which its flags do not tell."""
    get_vector_length, length_mask = 51, 0xFFFF  # PR_SVE_GET_VL of Linux's prctl, in bytes
    return 8 * (int(ctypes.CDLL(None).prctl(get_vector_length)) & length_mask)


def supported_builds() -> list[str]:
    """Builds that this processor runs, the best first."""
    return [name for name, needed in BUILDS.items() if needed <= processor_flags()]
