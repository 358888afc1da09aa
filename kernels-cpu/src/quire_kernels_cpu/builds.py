"""The compiled kernels: which build fits this processor, and their C functions.

Knows the C interface; does not know tensors or ops. `QUIRE_CPU_KERNELS` names a lower build than the
best one ("avx512bf16", "avx512vnni", "avx512", "avx2"), or "none". 64-bit Arm processors have "sve" and "neon". A path
there is a library to load in place of the package's own, whatever the processor: so tests load builds they emulate.
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache
from pathlib import Path

from quire_interfaces import ConfigError
from quire_kernels_cpu.abi import INTERFACE, declare_functions, layout_difference
from quire_kernels_cpu.compilation import sources_hash
from quire_kernels_cpu.compiler import library_path
from quire_kernels_cpu.processor import BUILDS, supported_builds

__all__ = ["BUILDS", "ENVIRONMENT", "build_name", "build_path", "library", "unavailable"]

_logger = logging.getLogger(__name__)

ENVIRONMENT = "QUIRE_CPU_KERNELS"


def build_name() -> str | None:
    """The best build that this processor runs and `QUIRE_CPU_KERNELS` allows, or None.

    Of those that were compiled, if any were: a source tree has the one build of the machine that it was set up on.

    Of a path in `QUIRE_CPU_KERNELS` the file's name: "amx-emulated" of "kernels_amx-emulated.so".

    Raises:
        ConfigError: `QUIRE_CPU_KERNELS` names no build.
    """
    if (own := _own_library()) is not None:
        return own.stem.removeprefix("kernels_")
    allowed = _allowed_builds()
    return next((name for name in allowed if library_path(name).is_file()), next(iter(allowed), None))


def _allowed_builds() -> list[str]:
    """Builds that this processor runs and `QUIRE_CPU_KERNELS` allows, the best first."""
    wanted = os.environ.get(ENVIRONMENT, "").strip().lower()
    names = list(BUILDS)
    if wanted and wanted != "none" and wanted not in names:
        raise ConfigError(f"{ENVIRONMENT} is {wanted!r}; choose one of {', '.join(names)}, none")
    if wanted == "none":
        return []
    return [name for name in supported_builds() if not wanted or names.index(name) >= names.index(wanted)]


def _own_library() -> Path | None:
    wanted = os.environ.get(ENVIRONMENT, "").strip()
    return Path(wanted) if "/" in wanted else None


def build_path() -> Path | None:
    """Where the library of `build_name()` lies if it was compiled, or None.

    Raises:
        ConfigError: `QUIRE_CPU_KERNELS` names no build.
    """
    name = build_name()
    return None if name is None else _own_library() or library_path(name)


@cache
def _load() -> ctypes.CDLL | str:
    path = build_path()
    if path is None:
        if os.environ.get(ENVIRONMENT):
            return f"{ENVIRONMENT}={os.environ[ENVIRONMENT]} switches the kernels off or asks for what is not here"
        return "needs an x86-64 processor with AVX2, AVX-512 or AMX, or a 64-bit Arm processor, under Linux"
    if not path.is_file():
        if _own_library() is not None:
            return f"is to be loaded from {path} ({ENVIRONMENT}), which is no file"
        return _not_compiled(build_name())
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        return f"cannot be loaded: {error}"
    if (stale := _stale(loaded, Path(__file__).with_name("csrc"))) is not None:
        return stale
    declare_functions(loaded)
    if _own_library() is None and (best := _allowed_builds()[0]) != build_name():
        _logger.warning("the CPU kernels are those of %s, because %s %s", build_name(), best, _not_compiled(best))
    return loaded


def _stale(loaded: ctypes.CDLL, csrc: Path) -> str | None:
    """Why a build does not belong to this source, or None: called with arguments that it does not know, it crashes."""
    again = _compile_command(build_name())
    try:
        version, sources = (_text(loaded, name) for name in ("quire_abi_version", "quire_sources"))
    except ValueError:
        return f"was compiled before builds had an ABI version: {again}"
    if version != INTERFACE.version:
        return f"has ABI version {version or 'none'} where this Python needs {INTERFACE.version}: {again}"
    if (struct := layout_difference(loaded)) is not None:
        return f"lays out {struct} otherwise than this Python: {again}"
    # A package may come without what it was compiled from, but for the header.
    if (csrc / "kernels.cpp").is_file() and sources != sources_hash(csrc):
        return f"was compiled from other sources than those in {csrc}: {again}"
    return None


def _text(loaded: ctypes.CDLL, name: str) -> str:
    return (ctypes.c_char_p.in_dll(loaded, name).value or b"").decode()


def _not_compiled(build: str | None) -> str:
    return f"was not compiled: with a C++ compiler (g++), {_compile_command(build)}"


def _compile_command(build: str | None) -> str:
    return f"`python -m quire_kernels_cpu.compiler {build}` compiles it"


def unavailable() -> str | None:
    """Why the kernels cannot serve in this process, or None."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


def library() -> ctypes.CDLL:
    """The C functions of the build that fits this processor.

    Raises:
        ConfigError: There is none; the message says why.
    """
    loaded = _load()
    if isinstance(loaded, str):
        raise ConfigError(f"quire-kernels-cpu {loaded}")
    return loaded
