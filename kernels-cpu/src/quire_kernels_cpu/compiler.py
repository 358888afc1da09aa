"""Compiles builds of the kernels into the package's folder: `python -m quire_kernels_cpu.compiler [BUILD ...]`.

Without names, the build that fits this processor best. Standard library only: `hatch_build.py` imports this before the
package is installed.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire_kernels_cpu.compilation import AARCH64_BUILDS, BUILDS, COMPILE, EXPORTS, build_header, sources_hash
from quire_kernels_cpu.processor import supported_builds

__all__ = ["compile_builds", "find_compiler", "library_path", "machine_builds", "wheel_platform"]

FOLDER = Path(__file__).parent
_ARCHITECTURES = {"x86_64": BUILDS, "AMD64": BUILDS, "aarch64": AARCH64_BUILDS, "arm64": AARCH64_BUILDS}

_MANYLINUX = (2, 28)
"""The oldest glibc that a wheel is offered to: torch's own wheels need it as well."""
_SYMBOL_LIMITS = {"GLIBC": _MANYLINUX, "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
"""Newest versions of the system's symbols that machines of that age have."""


def machine_builds() -> dict[str, list[str]]:
    """Builds for this machine's architecture -> flags of their instruction sets; empty where there are none."""
    return _ARCHITECTURES.get(platform.machine(), {}) if platform.system() == "Linux" else {}


def find_compiler() -> str | None:
    """The C++ compiler to use: `CXX`, or g++ or clang++ on the PATH; None where there is none."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def library_path(build: str) -> Path:
    """Where the library of a build lies when it has been compiled."""
    return FOLDER / f"kernels_{build}.so"


def compile_builds(builds: Iterable[str], compiler: str, report: Callable[[str], None]) -> list[Path]:
    """Compile builds, as many at a time as there are cores, and return the libraries that are up to date now.

    What was compiled from the same sources by the same recipe is kept. A build that fails is reported and left out: an
    old compiler may know AVX2 and not AMX.

    Args:
        builds: Names of `machine_builds()`.
        compiler: Program that takes the command line of g++.
        report: Called with a line of progress, from several threads.

    Raises:
        KeyError: A build is none of this machine's architecture.
    """
    flags = {name: machine_builds()[name] for name in builds}
    outdated = [name for name in flags if not _is_current(library_path(name))]
    if outdated:
        at_once = min(len(outdated), os.cpu_count() or 1)
        report(f"compiling {', '.join(outdated)}, {at_once} at a time; each takes one to two minutes of one core")
        started = time.monotonic()

        def compile_build(name: str) -> None:
            try:
                _compile(name, flags[name], compiler)
            except (OSError, subprocess.CalledProcessError) as error:
                report(f"{name} failed: {error}")
            else:
                report(f"{name} is compiled, after {time.monotonic() - started:.0f} s")

        with ThreadPoolExecutor(at_once) as pool:  # each of them waits for a compiler
            list(pool.map(compile_build, outdated))
    return [library_path(name) for name in flags if _is_current(library_path(name))]


def _is_current(library: Path) -> bool:
    recipe_s = (FOLDER / "compilation.py").stat().st_mtime
    if not library.exists() or library.stat().st_mtime < recipe_s:
        return False
    return sources_hash(FOLDER / "csrc").encode() in library.read_bytes()


def _compile(name: str, flags: list[str], compiler: str) -> None:
    """Compile one build. Another process may load the library meanwhile: it is replaced when it is whole."""
    library = library_path(name)
    files = [library.with_suffix(f".{os.getpid()}.{suffix}") for suffix in ("h", "map", "o", "so")]
    header, exports, obj, linked = files
    csrc = FOLDER / "csrc"
    try:
        header.write_text(build_header(csrc))
        exports.write_text(EXPORTS)
        source = [*COMPILE, *flags, "-include", str(header), str(csrc / "kernels.cpp")]
        subprocess.run([compiler, *source, "-o", str(obj)], check=True)
        script = f"-Wl,--version-script={exports}"
        subprocess.run([compiler, "-shared", script, str(obj), "-o", str(linked)], check=True)
        linked.replace(library)
    finally:
        for path in files:
            path.unlink(missing_ok=True)


def wheel_platform(libraries: Iterable[Path]) -> str:
    """Platform tag of a wheel with these libraries: manylinux where they need no newer system, else this Linux.

    The libraries are loaded by ctypes, so that no Python version or ABI is part of the tag. OpenMP's symbols have no
    version: torch's runtime provides them.
    """
    needed = b"\n".join(path.read_bytes() for path in libraries)
    versions = re.findall(rb"\b(GLIBC|GLIBCXX|CXXABI|GCC)_([0-9]+(?:\.[0-9]+)*)\0", needed)
    old_enough = all(
        tuple(map(int, version.decode().split("."))) <= _SYMBOL_LIMITS[library.decode()]
        for library, version in versions
    )
    is_glibc = platform.libc_ver()[0] == "glibc"
    system = "manylinux_{}_{}".format(*_MANYLINUX) if old_enough and is_glibc else "linux"
    return f"{system}_{platform.machine()}"


def main(arguments: list[str] | None = None) -> int:
    """Compile the builds that are named, say what is done, and return the exit status."""
    supported = [name for name in supported_builds() if name in machine_builds()]
    known = [*machine_builds(), "supported"]
    parser = argparse.ArgumentParser(
        prog="python -m quire_kernels_cpu.compiler",
        description="Compile builds of the CPU kernels; without names, the one that fits this processor best.",
    )
    parser.add_argument("builds", nargs="*", metavar="BUILD", help=f"{', '.join(known)} (all that this processor runs)")
    asked = parser.parse_args(arguments).builds
    if unknown := [name for name in asked if name not in known]:
        parser.error(f"there is no build {unknown[0]!r}; choose from {', '.join(known)}")
    builds = [name for ask in asked for name in (supported if ask == "supported" else [ask])] or supported[:1]
    compiler = find_compiler()
    if not builds or compiler is None:
        why = "there is no C++ compiler (g++ or clang++) on the PATH" if builds else "no build fits this processor"
        print(f"quire-kernels-cpu: {why}; torch serves", file=sys.stderr)
        return 1
    compiled = compile_builds(builds, compiler, lambda line: print(f"quire-kernels-cpu: {line}", file=sys.stderr))
    print(f"quire-kernels-cpu: up to date: {', '.join(path.name for path in compiled) or 'none'}", file=sys.stderr)
    return 0 if len(compiled) == len(set(builds)) else 1


if __name__ == "__main__":
    sys.exit(main())
