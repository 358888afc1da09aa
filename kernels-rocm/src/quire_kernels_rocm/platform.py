"""The AMD GPUs that kernels are built for, what a kernel may use of each, and how work is cut for them."""

from __future__ import annotations

from functools import cache

import torch

from quire_kernels_cuda.platform import Platform
from quire_kernels_cuda.targets import Target

__all__ = ["AMD", "AMD_TARGETS", "target_name"]


def _target(name: str, *, shared_kib: int, has_fp8: bool = False) -> Target:
    has_matrix_cores = name.startswith("gfx9")
    return Target(
        name=name,
        vendor="hip",
        arch=name,
        warp_size=64 if has_matrix_cores else 32,
        shared_memory_bytes=shared_kib * 1024,
        registers=512 if has_matrix_cores else 256,
        has_fp8=has_fp8,
    )


AMD_TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _target("gfx90a", shared_kib=64),
        _target("gfx942", shared_kib=64),  # its 8-bit floats are others than the cache's
        _target("gfx950", shared_kib=160, has_fp8=True),
        _target("gfx1100", shared_kib=64),
        _target("gfx1201", shared_kib=64, has_fp8=True),
    )
}
"""Registers and local data share of a work-group: the instruction set guides of CDNA 2 to 4 and RDNA 3 and 4."""


def target_name(arch: str) -> str | None:
    """The target of an architecture as torch tells it ("gfx942:sramecc+:xnack-"), or None if there is none for it."""
    name = arch.split(":")[0]
    if name in AMD_TARGETS:
        return name
    family = {"gfx110": "gfx1100", "gfx120": "gfx1201"}
    return next((target for prefix, target in family.items() if name.startswith(prefix) and len(name) == 7), None)


@cache
def _target_of(device: torch.device) -> Target:
    if device.type == "cpu":
        return AMD_TARGETS["gfx942"]
    name = target_name(torch.cuda.get_device_properties(device).gcnArchName)
    assert name is not None, "backends of unknown architectures are unavailable"
    return AMD_TARGETS[name]


AMD = Platform(targets=AMD_TARGETS, target_of=_target_of)
