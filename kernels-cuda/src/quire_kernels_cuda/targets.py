"""The GPUs that kernels are built for, and what a kernel may use of each.

The limits are here because the compiler does not check them all: a kernel that asks for more shared memory than there
is builds, and fails when it is launched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["NVIDIA_RELATIVES", "NVIDIA_TARGETS", "Target", "nvidia_target"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A kind of GPU."""

    name: str
    """As tables and reports call it: "sm_90", "gfx942"."""
    vendor: str
    """As Triton calls it: "cuda" or "hip"."""
    arch: int | str
    """As Triton takes it: 90, "gfx942"."""
    warp_size: int
    shared_memory_bytes: int
    """Shared memory that one block of threads can have."""
    registers: int
    """Vector registers of 32 bits that one thread can have, accumulation registers included."""
    multiprocessors: int = 128
    """Of a usual GPU of this kind: how work is divided where there is none to ask."""
    has_fp8: bool
    """Whether it converts numbers of float8_e4m3fn and float8_e5m2 itself, and multiplies them."""

    @property
    def has_few_registers(self) -> bool:
        """AMD's GPUs for graphics: half the registers that others have."""
        return self.vendor == "hip" and self.warp_size == 32

    @property
    def holds_operands_twice(self) -> bool:
        """RDNA 3: both halves of a wave hold the operands of a matrix product (its instruction set guide, WMMA)."""
        return self.has_few_registers and self.name.startswith("gfx11")


def _nvidia(capability: int, shared_kib: int, multiprocessors: int = 128) -> Target:
    return Target(
        name=f"sm_{capability}",
        vendor="cuda",
        arch=capability,
        warp_size=32,
        shared_memory_bytes=shared_kib * 1024,
        registers=255,
        multiprocessors=multiprocessors,
        has_fp8=capability >= 89,
    )


NVIDIA_TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _nvidia(80, 163, 108),
        _nvidia(89, 99, 142),
        _nvidia(90, 227, 132),
        _nvidia(100, 227, 148),
        _nvidia(120, 99, 170),
    )
}
"""Shared memory of a block: CUDA C++ Programming Guide, technical specifications per compute capability."""


def nvidia_target(capability: tuple[int, int]) -> Target:
    """What kernels are made for on a GPU of this compute capability: the highest target that is not above it.

    Raises:
        LookupError: The capability is below all targets.
    """
    wanted = 10 * capability[0] + capability[1]
    if wanted == 86:  # code of 8.0, with the shared memory of 8.9
        return _nvidia(86, 99)
    return [target for target in NVIDIA_TARGETS.values() if int(target.arch) <= wanted][-1]


NVIDIA_RELATIVES: dict[str, Target] = {
    target.name: target
    for target in (
        replace(nvidia_target((8, 6)), multiprocessors=82),
        replace(NVIDIA_TARGETS["sm_100"], name="sm_103", arch=103),
        replace(NVIDIA_TARGETS["sm_120"], name="sm_121", arch=121, multiprocessors=48),
    )
}
"""RTX 3090 and its likes, B300, GB10: binaries of their own, within the limits of what is built and tabulated."""
