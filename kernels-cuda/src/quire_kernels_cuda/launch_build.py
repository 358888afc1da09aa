"""Compiles a recorded kernel the way a launch would, for a GPU that is not here.

What identifies a compiled kernel depends on all that Triton's launch tells of the arguments, and differs between its
versions. So the launch itself is asked, with arguments that look like those recorded, under a driver that knows a
target and has no device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from quire_kernels_cuda.recording import POINTERS, Build
from quire_kernels_cuda.targets import Target

__all__ = ["build_as_launched", "driver_of"]

_DTYPES = {name: dtype for dtype, name in POINTERS.items()}


@dataclass(frozen=True, slots=True)
class _Memory:
    """A pointer, as a launch sees it."""

    dtype: torch.dtype
    address: int
    num_bytes: int

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:
        return self.num_bytes


class _Driver:
    def __init__(self, target: Target) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self._target.vendor, self._target.arch, self._target.warp_size)

    def get_current_device(self) -> str:
        return self._target.name  # kernels keep what they compiled by device

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def driver_of(target: Target) -> Iterator[None]:
    """Within it, Triton compiles for this target, and cannot launch."""
    from triton.runtime import driver

    before = driver._active  # asking for it would look for a device
    driver.set_active(_Driver(target))
    try:
        yield
    finally:
        driver._active = before


def build_as_launched(build: Build) -> None:
    """Compile, or find compiled. Within `driver_of`."""
    arguments = {name: _argument(build, name) for name in build.signature}
    build.kernel.run(
        **arguments, grid=(1,), warmup=True,
        num_warps=build.num_warps, num_stages=build.num_stages, enable_fp_fusion=build.enable_fp_fusion,
    )  # fmt: skip


def _argument(build: Build, name: str) -> Any:
    """A value that a launch takes for the same as what was recorded."""
    kind, is_aligned = build.signature[name], name in build.aligned
    if kind == "constexpr":
        return build.constants[name]
    if kind in _DTYPES:
        return _Memory(_DTYPES[kind], 4096 if is_aligned else 4104, 4096 if name in build.short else 1 << 32)
    if kind == "fp32":
        return 0.5
    if kind == "i1":
        return True
    number = 48 if is_aligned else 7
    return number if kind == "i32" else (1 << 40) + number
