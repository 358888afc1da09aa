"""The Triton kernels as backends of ops, for AMD GPUs."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from quire_kernels_cuda.attention_backends import sdpa_backends
from quire_kernels_cuda.availability import is_interpreted, why_no_triton
from quire_kernels_cuda.ops import op_backends
from quire_kernels_rocm.availability import unavailable
from quire_kernels_rocm.platform import AMD
from quire_ops import KernelBuilder, OpBackend

__all__ = ["NAME", "backends"]

NAME = "triton-rocm"


def backends() -> list[OpBackend[..., Any]]:
    """The entry point of group `quire.ops`."""
    reason = unavailable()
    target = None if reason is not None or is_interpreted() else AMD.target_of(torch.device("cuda", 0))
    own = op_backends(NAME, AMD, reason, target=target, builder=_builder())
    return own + sdpa_backends("sdpa-rocm", AMD, reason)


@cache
def _builder() -> KernelBuilder | None:
    """What builds them, on machines without such a GPU too."""
    if why_no_triton() or is_interpreted():
        return None
    from quire_kernels_cuda.builder import TritonBuilder

    return TritonBuilder(NAME, AMD, unavailable, lambda target: op_backends(NAME, AMD, None, target=target))
