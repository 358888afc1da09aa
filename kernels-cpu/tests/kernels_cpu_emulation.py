"""Compiles a build's source for processors that lack its instructions: `emulated/immintrin.h` has them in C++.

Standard library only: `noxfile.py` runs this file by its path. What is compiled here is never a part of the package: it
is loaded only where `QUIRE_CPU_KERNELS` is its path, and its name says what it is.
"""

from __future__ import annotations

import runpy
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["EMULATED", "RECIPE", "compile_builds", "emulating_flags"]

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "src" / "quire_kernels_cpu"
RECIPE = runpy.run_path(str(PACKAGE / "compilation.py"))

EMULATED: dict[str, list[str]] = {
    "avx512": [],
    "avx512vnni": ["-DQUIRE_EMULATED_VNNI"],
    "avx512bf16": ["-DQUIRE_EMULATED_BF16"],
    "amx": ["-DQUIRE_EMULATED_AMX"],
}
"""Builds that can be emulated on a processor with AVX2 -> what the header is to say that there is beyond AVX-512."""


def emulating_flags(build: str) -> list[str]:
    """By which a build's source is compiled for the processor of the build `avx2`, which emulates it.

    Raises:
        KeyError: It is not one of `EMULATED`.
    """
    # The last -O counts: -O1 compiles in a third of -O3's time, which is longer than what the tests lose by it.
    return [*RECIPE["FLAGS"], "-O1", *RECIPE["BUILDS"]["avx2"], f"-I{TESTS / 'emulated'}", *EMULATED[build]]


def compile_builds(builds: Iterable[str], folder: Path, compiler: str = "g++") -> dict[str, Path]:
    """Compiles builds into `folder`, two at a time: build -> its library.

    Raises:
        subprocess.CalledProcessError: One does not compile.
    """
    csrc = PACKAGE / "csrc"

    def compiled(build: str) -> Path:
        library, header = folder / f"kernels_{build}-emulated.so", folder / f"{build}.h"
        header.write_text(RECIPE["build_header"](csrc))
        exports = folder / f"{build}.map"
        exports.write_text(RECIPE["EXPORTS"])
        flags = [*emulating_flags(build), "-include", str(header), "-Werror", "-fPIC", "-fvisibility=hidden", "-shared"]
        flags.append(f"-Wl,--version-script={exports}")
        subprocess.run([compiler, *flags, str(csrc / "kernels.cpp"), "-o", str(library)], check=True)
        return library

    builds = list(builds)
    with ThreadPoolExecutor(2) as pool:  # each of them waits for a compiler
        return dict(zip(builds, pool.map(compiled, builds), strict=True))
