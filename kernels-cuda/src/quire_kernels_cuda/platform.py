"""What kernels ask about the GPUs of one vendor: which target a device is, and how to cut work for it.

The kernels' source is the same for all vendors; a `Platform` is what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import torch

from quire_kernels_cuda.targets import NVIDIA_TARGETS, Target, nvidia_target

__all__ = ["NVIDIA", "LaunchConfig", "Platform", "num_multiprocessors", "pretending"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """How the work of a kernel is cut, and with what it is launched."""

    blocks: Mapping[str, int]
    """Sizes of a program's piece by the kernel's names for them, powers of two: {"BLOCK_N": 64}."""
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """The GPUs of one vendor."""

    targets: Mapping[str, Target]
    """What kernels are built for, by name."""
    target_of: Callable[[torch.device], Target]
    """The target of a device; of the CPU, the one that the interpreter stands for."""
    tuned: Mapping[tuple[str, str, int], LaunchConfig] = field(default_factory=dict)
    """(kernel, name of the target, size that matters to the kernel) -> what was found to be fastest."""

    def config(self, kernel: str, target: Target, size: int, otherwise: LaunchConfig) -> LaunchConfig:
        """The tuned configuration, or `otherwise` where nobody has tuned."""
        return self.tuned.get((kernel, target.name, size), otherwise)


_pretended: list[Target] = []


@contextmanager
def pretending(target: Target) -> Iterator[None]:
    """Within it, every device of this process is taken for a GPU of this target: for finding out what it would run."""
    _pretended.append(target)
    try:
        yield
    finally:
        _pretended.pop()


def num_multiprocessors(device: torch.device) -> int:
    """Of what is no GPU: few where kernels are interpreted, many where they are only recorded."""
    if _pretended:
        return _pretended[-1].multiprocessors
    if device.type != "cuda":
        return 128 if device.type == "meta" else 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _nvidia_target_of(device: torch.device) -> Target:
    if _pretended:
        return _pretended[-1]
    if device.type == "cpu":
        return NVIDIA_TARGETS["sm_90"]
    return _target_of_gpu(device)


@cache
def _target_of_gpu(device: torch.device) -> Target:
    return nvidia_target(torch.cuda.get_device_capability(device))


NVIDIA = Platform(targets=NVIDIA_TARGETS, target_of=_nvidia_target_of)
