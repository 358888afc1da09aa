"""The Triton kernels as backends of ops, for AMD GPUs."""

from __future__ import annotations

from functools import cache

import torch

from quire_kernels_cuda.availability import is_interpreted, why_no_triton
from quire_kernels_cuda.ops import op_backends
from quire_kernels_rocm.platform import AMD, AMD_TARGETS, target_name
from quire_ops import OpBackend

__all__ = ["backends"]


def backends() -> list[OpBackend]:
    """The entry point of group `quire.ops`."""
    reason = _unavailable()
    target = None if reason is not None or is_interpreted() else AMD.target_of(torch.device("cuda", 0))
    return op_backends("triton-rocm", AMD, reason, target=target)


@cache
def _unavailable() -> str | None:
    """Why the kernels cannot work on an AMD GPU in this process, or None."""
    if (reason := why_no_triton()) is not None or is_interpreted():
        return reason
    if torch.version.hip is None:
        return "this build of torch is not for AMD GPUs"
    if not torch.cuda.is_available():
        return "torch finds no AMD GPU"
    arch = torch.cuda.get_device_properties(0).gcnArchName
    if target_name(arch) is None:
        return f"there are kernels for {', '.join(AMD_TARGETS)}, not for {arch}"
    return None
