"""Whether Triton kernels can work in this process. Does not import Triton."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch

__all__ = ["is_interpreted", "unavailable", "why_no_triton"]


def is_interpreted() -> bool:
    """Whether kernels run under Triton's interpreter, on the CPU: for tests, thousands of times slower than a GPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def why_no_triton() -> str | None:
    """Why there is no Triton, or None."""
    return None if find_spec("triton") is not None else "Triton is not installed (pip install triton)"


@cache
def unavailable() -> str | None:
    """Why the kernels cannot work on an NVIDIA GPU in this process, or None."""
    if (reason := why_no_triton()) is not None or is_interpreted():
        return reason
    if torch.version.hip is not None:
        return "this build of torch is for AMD GPUs, whose kernels are in quire-kernels-rocm (triton-rocm)"
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU"
    if (capability := torch.cuda.get_device_capability()) < (8, 0):
        return f"needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
    return None
