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
from quire_kernels_cpu.compilation import sources_hash
from quire_kernels_cpu.compiler import library_path
from quire_kernels_cpu.processor import BUILDS, supported_builds

__all__ = ["BUILDS", "ENVIRONMENT", "build_name", "build_path", "library", "unavailable"]

_logger = logging.getLogger(__name__)

ENVIRONMENT = "QUIRE_CPU_KERNELS"

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, tuple[list[type], type | None]] = {
    "quire_linear": ([_I, _P, _P, _P, _L, _L, _L, _I], None),
    "quire_linear_largest": ([_I, _P, _P, _P, _P, _L, _L, _L], None),
    "quire_draw": ([_P, _L, _P, _P, _L, _P, _P, _P], None),
    "quire_draw_masked": ([_P, _L, _P, _P, _L, _P, _P, _P, _P, _P], None),
    "quire_step_inputs": ([_P, _L, _P, _P, _P, _L, _P, _P, _P, _P, _P, _I], None),
    "quire_decode_step": ([_I, _P, _P], _I),
    "quire_rms_norm": ([_I, _P, _P, _P, _P, _L, _L, _F], None),
    "quire_activate": ([_I, _I, _P, _P, _P, _L], None),
    "quire_write_kv_cache": ([_I, _P, _P, _P, _I, _P, _P, _L, _I, _I, _I, _L], None),
    "quire_rotate_and_write": (
        [_I, _P, _P, _P, _P, _P, _P, _P, _I, _F, _P, _I, _P, _P, _L, _I, _I, _I, _I, _L],
        None,
    ),
    "quire_attention": (
        [_I, _P, _P, _I, _P, _P, _P, _L, _P, _P, _I, _I, _I, _I, _I, _L, _F, _I, _F, _P, _P, _P, _L],
        None,
    ),
    "quire_latent_attention": ([_I, _P, _P, _P, _P, _L, _P, _P, _I, _I, _I, _I, _I, _L, _L, _F, _P, _L], None),
    "quire_sparse_latent_attention": ([_I, _P, _P, _P, _P, _L, _L, _I, _I, _I, _I, _I, _L, _L, _F], None),
    "quire_index_topk": ([_I, _P, _P, _P, _P, _P, _L, _P, _P, _I, _I, _I, _I, _L, _L, _I], None),
    "quire_head_linear": ([_I, _P, _L, _L, _P, _L, _P, _L, _L, _L, _L], None),
    "quire_decoder_new": ([_I, _I, _P, _P, _L, _I, _I, _I, _I, _I, _F], _P),
    "quire_decoder_delete": ([_I, _P], None),
    "quire_decoder_set_lora": ([_I, _P, _P], None),
    "quire_decoder_run": ([_I, _P, _P, _P, _P, _P, _L, _I, _P, _P, _P, _P, _I, _I, _P, _P, _L, _L, _P, _P, _L], None),
    "quire_lora_linear": ([_I, _I, _P, _P, _P, _L, _L, _P, _P, _L, _L], None),
    "quire_route_experts": ([_P, _L, _P, _P, _L, _I, _P, _P], None),
    "quire_moe_new": ([_I, _I, _P, _L, _L, _I, _F], _P),
    "quire_moe_delete": ([_I, _P], None),
    "quire_moe_run": ([_I, _P, _P, _P, _P, _L, _I, _P], None),
    "quire_causal_conv1d": ([_I, _P, _L, _P, _P, _P, _L, _P, _P, _P, _L, _I, _I], None),
    "quire_mamba2_scan": ([_I, _P, _P, _P, _P, _L, _P, _P, _P, _I, _I, _I, _I, _F, _F], None),
    "quire_selective_scan": ([_I, _P, _P, _P, _P, _L, _P, _P, _P, _L, _I], None),
    "quire_gated_delta_rule": ([_I, _P, _P, _P, _P, _L, _P, _P, _P, _I, _I, _I, _I], None),
    "quire_wkv": ([_I, _P, _P, _P, _P, _L, _P, _P, _P, _L], None),
    "quire_read": ([_P, _L], _L),
}


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
    for function, (arguments, result) in _SIGNATURES.items():
        kernel = getattr(loaded, function, None)
        if kernel is None:
            return f"was compiled before {function} was written: {_compile_command(build_name())}"
        kernel.argtypes, kernel.restype = arguments, result
    if _own_library() is None and (best := _allowed_builds()[0]) != build_name():
        _logger.warning("the CPU kernels are those of %s, because %s %s", build_name(), best, _not_compiled(best))
    return loaded


def _stale(loaded: ctypes.CDLL, csrc: Path) -> str | None:
    """Why a build does not belong to this source, or None: called with arguments that it does not know, it crashes."""
    asked = getattr(loaded, "quire_sources", None)
    if asked is None:
        return f"was compiled before it could tell from which sources: {_compile_command(build_name())}"
    asked.argtypes, asked.restype = [], ctypes.c_char_p
    try:
        here = sources_hash(csrc)
    except OSError:  # only the build was installed, together with this file
        return None
    if asked().decode() == here:
        return None
    return f"was compiled from other sources than those in {csrc}: {_compile_command(build_name())}"


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
