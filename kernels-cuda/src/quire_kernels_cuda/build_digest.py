"""A digest of everything that a compiled kernel depends on, so that what was built before need not be built again.

Two builds with one digest come out of one compiler, one source, one specialization and one target. Knows no table.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from types import ModuleType
from typing import Any

from quire_kernels_cuda.recording import Build
from quire_kernels_cuda.targets import Target

__all__ = ["build_digest", "kernel_sources"]

_DIGEST_CHARS = 16


def build_digest(build: Build, target: Target, compiler: str) -> str:
    """Digest of one build for one target, as 16 hexadecimal digits.

    Args:
        compiler: Version of Triton, and whatever else of the toolchain decides what comes out.
    """
    sources = kernel_sources(build.kernel)
    constants = {}
    for name, given in sorted(build.constants.items()):
        if _is_kernel(given):
            sources |= kernel_sources(given)
        constants[name] = _name_of(given) if _is_kernel(given) else given
    specialization = (
        sorted(build.signature.items()),
        sorted(constants.items()),
        sorted(build.aligned),
        sorted(build.short),
        (build.num_warps, build.num_stages, build.enable_fp_fusion),
    )
    text = repr((compiler, target, specialization, sorted(sources.items())))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]


def kernel_sources(kernel: Any) -> dict[str, str]:
    """Sources of a kernel and of every function under `triton.jit` that it calls, however deep, and the values of the
    constants that they read: name -> text."""
    found: dict[str, str] = {}
    waiting = [kernel]
    while waiting:
        function = waiting.pop()
        name = _name_of(function)
        if name in found:
            continue
        source = textwrap.dedent(inspect.getsource(function.fn))
        found[name] = source
        scope = {**function.fn.__globals__, **inspect.getclosurevars(function.fn).nonlocals}
        for word in sorted({node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}):
            value = scope.get(word)
            if _is_kernel(value):
                waiting.append(value)
            elif isinstance(value, ModuleType):
                if value.__name__.startswith("quire_"):  # whatever of it is used
                    found[value.__name__] = inspect.getsource(value)
            elif word in scope:
                value = getattr(value, "value", value)  # of a tl.constexpr
                if not callable(value):
                    found[f"{name}.{word}"] = repr(value)
    return found


def _is_kernel(value: Any) -> bool:
    return inspect.isfunction(getattr(value, "fn", None))


def _name_of(function: Any) -> str:
    return f"{function.fn.__module__}:{function.fn.__qualname__}"
