"""What kernels ask about the GPUs of one vendor: which target a device is, and how to cut work for it.

The kernels' source is the same for all vendors; a `Platform` is what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, overload

import torch

from quire_kernels_cuda.targets import NVIDIA_RELATIVES, NVIDIA_TARGETS, Target, nvidia_target
from quire_kernels_cuda.tuned import LaunchConfig, Problem, Tables, canonical_gpu_name

__all__ = [
    "NVIDIA",
    "LaunchConfig",
    "Platform",
    "choosing",
    "gpu_of",
    "num_multiprocessors",
    "pretended_target",
    "pretending",
]

Chooser = Callable[[Problem, LaunchConfig | None], LaunchConfig | None]
"""(problem, what the kernel works out itself) -> what it is launched with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """The GPUs of one vendor."""

    targets: Mapping[str, Target]
    """What kernels are built for, and held against the limits of, by name."""
    target_of: Callable[[torch.device], Target]
    """The target of a device; of the CPU, the one that the interpreter stands for."""
    relatives: Mapping[str, Target] = field(default_factory=dict)
    """GPUs with the limits of one of `targets`, under whose own names the compiler keeps what it compiles."""
    tables: Tables = field(default_factory=Tables)
    """What was measured to be fastest."""

    @overload
    def config(
        self, kernel: str, device: torch.device, otherwise: LaunchConfig, *, sizes: Mapping[str, int], **traits: Any
    ) -> LaunchConfig: ...

    @overload
    def config(
        self, kernel: str, device: torch.device, otherwise: None, *, sizes: Mapping[str, int], **traits: Any
    ) -> LaunchConfig | None: ...

    def config(
        self,
        kernel: str,
        device: torch.device,
        otherwise: LaunchConfig | None,
        *,
        sizes: Mapping[str, int],
        **traits: Any,
    ) -> LaunchConfig | None:
        """What to launch a kernel with: what was measured on this GPU for this problem or a near one, else `otherwise`.

        Args:
            kernel: A name of `tuned.BLOCK_NAMES`.
            otherwise: From a model of the GPU's limits. None stands for another library's kernel, in the place of which
                only what was measured for this very problem is taken.
            sizes: What may be near. Counts that change from step to step must be rounded to powers of two.
            traits: What must be the same.
        """
        if _choosers:
            return _choosers[-1](Problem.of(kernel, sizes, traits), otherwise)
        return self._measured(device, kernel, sizes, traits, otherwise)

    def _measured(
        self,
        device: torch.device,
        kernel: str,
        sizes: Mapping[str, int],
        traits: Mapping[str, Any],
        otherwise: LaunchConfig | None,
    ) -> LaunchConfig | None:
        gpu = gpu_of(device)
        if gpu is None:
            return otherwise
        return self.tables.find(gpu, kernel, sizes, traits, exact=otherwise is None) or otherwise

    def deciding(self, kernel: str, config: LaunchConfig | None, device: torch.device) -> AbstractContextManager[None]:
        """Within it one kernel is launched with this configuration, or not where there is none; what its op calls
        besides is launched as tables say, as it would be while serving."""

        def choose(problem: Problem, otherwise: LaunchConfig | None) -> LaunchConfig | None:
            if problem.kernel == kernel:
                return config
            return self._measured(device, problem.kernel, dict(problem.sizes), dict(problem.traits), otherwise)

        return choosing(choose)


_choosers: list[Chooser] = []


@contextmanager
def choosing(chooser: Chooser) -> Iterator[None]:
    """Within it, `chooser` decides in the place of tables: for measuring, and for noting what is asked."""
    _choosers.append(chooser)
    try:
        yield
    finally:
        _choosers.pop()


class _Pretended(NamedTuple):
    target: Target
    gpu: str | None


_pretended: list[_Pretended] = []


@contextmanager
def pretending(target: Target, gpu: str | None = None) -> Iterator[None]:
    """Within it, every device of this process is taken for a GPU of this target: for finding out what it would run.

    Args:
        gpu: Canonical name of the GPU, whose table is read then.
    """
    _pretended.append(_Pretended(target, gpu))
    try:
        yield
    finally:
        _pretended.pop()


def pretended_target() -> Target | None:
    """What every device is taken for at the moment, or None."""
    return _pretended[-1].target if _pretended else None


def gpu_of(device: torch.device) -> str | None:
    """The canonical name of a GPU; None of what is none."""
    if _pretended:
        return _pretended[-1].gpu
    return _gpu_name(device) if device.type == "cuda" else None


@cache
def _gpu_name(device: torch.device) -> str:
    arch = getattr(torch.cuda.get_device_properties(device), "gcnArchName", "")  # of AMD's GPUs
    return canonical_gpu_name(torch.cuda.get_device_name(device), arch=arch.partition(":")[0])


def num_multiprocessors(device: torch.device) -> int:
    """Of what is no GPU: few where kernels are interpreted, many where they are only recorded."""
    if _pretended:
        return _pretended[-1].target.multiprocessors
    if device.type != "cuda":
        return 128 if device.type == "meta" else 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _nvidia_target_of(device: torch.device) -> Target:
    if (target := pretended_target()) is not None:
        return target
    if device.type == "cpu":
        return NVIDIA_TARGETS["sm_90"]
    return _target_of_gpu(device)


@cache
def _target_of_gpu(device: torch.device) -> Target:
    return nvidia_target(torch.cuda.get_device_capability(device))


NVIDIA = Platform(targets=NVIDIA_TARGETS, target_of=_nvidia_target_of, relatives=NVIDIA_RELATIVES)
