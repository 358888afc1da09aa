"""How `quire ops` shows which backend each op got."""

from __future__ import annotations

import torch

from quire_interfaces import ConfigError
from quire_ops import OpRequest, kernel_builders, op_report

__all__ = ["print_ops"]


def print_ops(*, device: str, dtype: str) -> int:
    """Print, per op, the backend that serves on this machine and why each other one does not."""
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise ConfigError(f"dtype must be float32, bfloat16 or float16, got {dtype!r}", field="dtype")
    print(f"ops on {device} in {dtype}:")
    for choice in op_report(OpRequest(device=device, dtype=torch_dtype)):
        print(f"  {choice.op:<20}{choice.backend}")
        for backend, reason in choice.refused.items():
            print(f"  {'':<20}  not {backend}: {reason}")
    for builder in kernel_builders() if device == "cuda" else ():
        if (configurations := builder.configurations()) is not None:
            print(f"kernel configurations: {configurations}")
    return 0
