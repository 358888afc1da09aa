"""How the kernels are compiled: flags of each build, and the sources that a build is made of.

Standard library only: `hatch_build.py` and `noxfile.py` run this file by its path, before the package is installed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

__all__ = ["AARCH64_BUILDS", "BUILDS", "COMPILE", "FLAGS", "sources_define", "sources_hash"]

AVX512 = ["-march=x86-64-v4", "-mprefer-vector-width=512"]
AVX512_VNNI = [*AVX512, "-mavx512vnni"]
AVX512_BF16 = [*AVX512_VNNI, "-mavx512bf16", "-mavx512vbmi"]
BUILDS = {
    "avx2": ["-march=x86-64-v3"],
    "avx512": AVX512,
    "avx512vnni": AVX512_VNNI,
    "avx512bf16": AVX512_BF16,
    "amx": [*AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
}
"""Build -> flags of its instruction set, on x86-64."""
AARCH64_BUILDS = {"neon": ["-march=armv8-a"], "sve": ["-march=armv8.2-a+sve", "-msve-vector-bits=256"]}
"""Build -> flags of its instruction set, on 64-bit Arm."""
# OpenMP's symbols are left open on purpose: they resolve to the runtime that torch has loaded, so that there is one
# pool of threads and not two. The warning is about gcc 12's own headers.
FLAGS = ["-O3", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
"""What every build is compiled with, as a part of a program too."""
COMPILE = [*FLAGS, "-fPIC", "-c"]
"""What every build of the library is compiled with."""


def sources_hash(csrc: Path) -> str:
    """What the files of `csrc` are, by name and content: SHA-256 in hexadecimal digits.

    Raises:
        OSError: `csrc` is no folder that can be read.
    """
    digest = hashlib.sha256()
    for source in sorted(csrc.iterdir()):
        if source.suffix in (".h", ".cpp"):
            content = source.read_bytes()
            digest.update(f"{source.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def sources_define(csrc: Path) -> str:
    """The flag by which a build knows what it was compiled from; `builds.py` asks it when it is loaded."""
    return f'-DQUIRE_SOURCES="{sources_hash(csrc)}"'
