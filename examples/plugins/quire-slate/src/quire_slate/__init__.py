"""The platform `slate`: a device that the CPU plays, with little memory of its own, and float32 alone.

A package for real hardware sets `device_type` to what its build of torch calls the device ("xpu", "npu") and `module`
to the module with its streams and memory figures ("torch.xpu", "torch_npu.npu"); kernels come as `quire.ops`.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces.platforms import Platform

__all__ = ["SLATE", "SlatePlatform"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlatePlatform(Platform):
    """Devices that have so much memory each."""

    memory_bytes: int

    def free_bytes(self, device: str) -> int:
        """What a device can give to new allocations."""
        return self.memory_bytes

    def devices(self) -> dict[str, str]:
        """The one device that there is."""
        return {"slate:0": f"a slate of {self.memory_bytes >> 20} MiB"}


SLATE = SlatePlatform(
    name="slate",
    device_type="cpu",
    dtypes=("float32",),
    attention_backend="reference",
    memory_bytes=64 << 20,
)
