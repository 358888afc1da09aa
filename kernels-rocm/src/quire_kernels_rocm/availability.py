"""Whether the kernels can work on an AMD GPU in this process. Does not import Triton."""

from __future__ import annotations

from functools import cache

import torch

from quire_kernels_cuda.availability import is_interpreted, why_no_triton
from quire_kernels_rocm.platform import AMD_RELATIVES, AMD_TARGETS, target_name

__all__ = ["unavailable"]


@cache
def unavailable() -> str | None:
    """Why the kernels cannot work on an AMD GPU in this process, or None."""
    if (reason := why_no_triton()) is not None or is_interpreted():
        return reason
    if torch.version.hip is None:
        return "this build of torch is not for AMD GPUs"
    if not torch.cuda.is_available():
        return "torch finds no AMD GPU"
    arch = torch.cuda.get_device_properties(0).gcnArchName
    if target_name(arch) is None:
        return f"there are kernels for {', '.join([*AMD_TARGETS, *AMD_RELATIVES])}, not for {arch}"
    return None
