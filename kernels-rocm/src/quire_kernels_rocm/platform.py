"""The AMD GPUs that kernels are built for, what a kernel may use of each, and how work is cut for them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from quire_kernels_cuda.platform import Platform, pretended_target
from quire_kernels_cuda.targets import Target

__all__ = ["AMD", "AMD_RELATIVES", "AMD_TARGETS", "target_name"]


def _target(name: str, multiprocessors: int, *, shared_kib: int = 64, has_fp8: bool = False) -> Target:
    has_matrix_cores = name.startswith("gfx9")
    return Target(
        name=name,
        vendor="hip",
        arch=name,
        warp_size=64 if has_matrix_cores else 32,
        shared_memory_bytes=shared_kib * 1024,
        registers=512 if has_matrix_cores else 256,
        multiprocessors=multiprocessors,
        has_fp8=has_fp8,
    )


AMD_TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _target("gfx90a", 110),
        _target("gfx942", 304),  # its 8-bit floats are others than the cache's
        _target("gfx950", 256, shared_kib=160, has_fp8=True),
        _target("gfx1100", 48),
        _target("gfx1201", 32, has_fp8=True),
    )
}
"""Registers and local data share of a work-group: the instruction set guides of CDNA 2 to 4 and RDNA 3 and 4.
Multiprocessors as HIP counts them, compute units or pairs of them (RDNA): of a die of MI250X, of MI300X, MI355X,
RX 7900 XTX and RX 9070 XT."""

AMD_RELATIVES: dict[str, Target] = {
    name: replace(AMD_TARGETS[like], name=name, arch=name, multiprocessors=multiprocessors)
    for name, like, multiprocessors in (
        ("gfx1101", "gfx1100", 30),
        ("gfx1102", "gfx1100", 16),
        ("gfx1200", "gfx1201", 16),
    )
}
"""Radeon RX 7800 XT, RX 7600, RX 9060 XT: the limits of their family's largest, binaries of their own."""


def target_name(arch: str) -> str | None:
    """The target of an architecture as torch tells it ("gfx942:sramecc+:xnack-"), or None if there is none for it."""
    name = arch.split(":")[0]
    if name in AMD_TARGETS:
        return name
    family = {"gfx110": "gfx1100", "gfx120": "gfx1201"}
    return next((target for prefix, target in family.items() if name.startswith(prefix) and len(name) == 7), None)


def _target_of(device: torch.device) -> Target:
    if (target := pretended_target()) is not None:
        return target
    if device.type == "cpu":
        return AMD_TARGETS["gfx942"]
    return _target_of_gpu(device)


@cache
def _target_of_gpu(device: torch.device) -> Target:
    name = target_name(torch.cuda.get_device_properties(device).gcnArchName)
    assert name is not None, "backends of unknown architectures are unavailable"
    return AMD_TARGETS[name]


AMD = Platform(targets=AMD_TARGETS, target_of=_target_of, relatives=AMD_RELATIVES)
