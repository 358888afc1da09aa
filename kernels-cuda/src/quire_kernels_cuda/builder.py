"""`KernelBuilder` of the Triton kernels: records what a network launches, compiles that, tunes it, reads folders.

For every vendor: a package makes one for its own platform.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from quire_interfaces import ConfigError
from quire_kernels_cuda import library_products
from quire_kernels_cuda.kernel_folder import compiler_build, read_manifest, reading_class, seal, writing_class
from quire_kernels_cuda.launch_build import build_as_launched, driver_of
from quire_kernels_cuda.platform import Platform, gpu_of, pretending
from quire_kernels_cuda.recording import Build, kernel_of, named, recording
from quire_kernels_cuda.targets import Target
from quire_kernels_cuda.tuned import Problem, save
from quire_kernels_cuda.tuning import (
    candidates,
    compiling_pool,
    default_on,
    device_time_us,
    fitting,
    in_order,
    noting,
    tune,
)
from quire_ops import OpBackend
from quire_ops.backends import op_table, replaced_backends

__all__ = ["TritonBuilder"]

_logger = logging.getLogger(__name__)

_OTHERWISE = {
    "skinny_matmul": "torch's product",
    "gated_matmul": "the best product and its gate",
    "byte_matmul": "torch's library",
}
"""What serves in the place of kernels that only tables choose."""


class TritonBuilder:
    """See `KernelBuilder`.

    Args:
        name: Of the backends.
        platform: Whose GPUs they run on.
        unavailable: Says why they cannot work on such a GPU in this process, or None.
        backends_for: The backends of this name on a target, as if they could work.
    """

    def __init__(
        self,
        name: str,
        platform: Platform,
        unavailable: Callable[[], str | None],
        backends_for: Callable[[Target], Sequence[OpBackend[..., Any]]],
    ) -> None:
        self._name = name
        self._platform = platform
        self._unavailable = unavailable
        self._backends_for = backends_for
        self._targets = {**platform.targets, **platform.relatives}

    @property
    def targets(self) -> tuple[str, ...]:
        """See `KernelBuilder`."""
        return tuple(self._targets)

    @property
    def has_short_pointers(self) -> bool:
        """See `KernelBuilder`."""
        return any(target.vendor == "hip" for target in self._targets.values())

    @contextmanager
    def recording(self, target: str, gpu: str | None = None) -> Iterator[list[Build]]:
        """See `KernelBuilder`."""
        with self._recording(self._target(target), gpu) as builds:
            yield builds

    @contextmanager
    def _recording(self, target: Target, gpu: str | None) -> Iterator[list[Build]]:
        backends = [*self._backends_for(target), *self._others(target)]
        with pretending(target, gpu), recording("", target.vendor) as builds, replaced_backends(backends):
            yield builds

    def _others(self, target: Target) -> Iterator[OpBackend[..., Any]]:
        """What other packages build: not for this GPU, even where one of theirs is in the machine."""
        for op in op_table().ops:
            for backend in op_table().backends(op):
                if backend.builder is not None and backend.builder is not self:
                    yield replace(backend, unavailable=f"has no kernels for {target.name}")

    @contextmanager
    def noting(self, target: str | None = None) -> Iterator[list[Problem]]:
        """See `KernelBuilder`."""
        problems: list[Problem] = []
        found = self._platform.target_of(torch.device("cuda")) if target is None else self._target(target)
        with self._recording(found, None), noting(problems):
            yield problems

    def candidates(self, problem: Problem, target: str) -> int:
        """See `KernelBuilder`."""
        found = self._target(target)
        return len(candidates(problem, default_on(problem, self._platform, found), found))

    def tune(self, problems: Sequence[Problem], folder: Path, *, num_processes: int, context: int) -> Iterator[str]:
        """See `KernelBuilder`."""
        import triton

        if (reason := self._unavailable()) is not None:
            raise ConfigError(f"kernels are timed on a GPU, and there is none here: {reason}", field="device")
        device = torch.device("cuda", torch.cuda.current_device())
        gpu, target = gpu_of(device), self._platform.target_of(device)
        assert gpu is not None
        time_us = device_time_us(device)
        folder.mkdir(parents=True, exist_ok=True)
        self.use_tables(folder)
        with compiling_pool(num_processes) as pool:
            for problem in in_order(problems):
                configs = candidates(problem, default_on(problem, self._platform, target), target)
                fits = fitting(problem, configs, self._platform, target, pool)
                fit = [each.config for each in fits if each.refusal is None]
                entry = tune(
                    problem, fit, self._platform, device, time_us=time_us, version=triton.__version__, context=context
                )  # fmt: skip
                save(folder, gpu, [] if entry is None else [entry], dropped=[problem])
                self.use_tables(folder)  # what follows may be held against it
                if entry is None:
                    yield f"{problem}: none of {len(fit)} is faster than {_OTHERWISE[problem.kernel]}"
                    continue
                yield f"{problem}: {entry.median_us:.1f} us, {entry.default_us:.1f} us untuned, the best of {len(fit)}"

    def use_tables(self, folder: Path) -> None:
        """See `KernelBuilder`."""
        self._platform.tables.use(folder)

    def configurations(self) -> str | None:
        """See `KernelBuilder`."""
        if self._unavailable() is not None:
            return None
        device = torch.device("cuda", torch.cuda.current_device())
        gpu = gpu_of(device)
        if gpu is None:
            return None
        return f"{self._platform.tables.describe(gpu)}; {library_products.report(device, self._platform)}"

    def build(self, kernels: Sequence[Build], target: str, folder: Path, *, num_processes: int) -> int:
        """See `KernelBuilder`. Raises RuntimeError where a kernel does not compile."""
        found = self._target(target)
        folder.mkdir(parents=True, exist_ok=True)
        if num_processes == 1:
            num_new = _build_part([named(build) for build in kernels], found, folder)
            seal(folder, target)
            return num_new
        parts = [[named(build) for build in kernels[first::num_processes]] for first in range(num_processes)]
        with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
            futures = [pool.submit(_build_part, part, found, folder) for part in parts]
            num_new = sum(future.result() for future in futures)
        seal(folder, target)
        return num_new

    def use(self, folder: Path) -> None:
        """See `KernelBuilder`."""
        import triton

        manifest = read_manifest(folder)
        written_by = manifest["triton"]
        if written_by != triton.__version__:
            raise ConfigError(
                f"the kernels in {folder} were compiled by Triton {written_by}, of which Triton {triton.__version__} "
                "finds none; compile them with this version, or leave --kernel-cache out",
                field="kernel_cache",
            )
        if manifest.get("build", compiler_build()) != compiler_build():
            raise ConfigError(
                f"the kernels in {folder} were compiled by another build of Triton {written_by}, of which this one "
                "finds none: one for another Python, or of another package (torch for AMD GPUs brings its own); "
                "compile them where the same packages are installed as here, or leave --kernel-cache out",
                field="kernel_cache",
            )
        triton.knobs.cache.manager_class = reading_class(folder)

    def count_compilations(self) -> Mapping[str, int]:
        """See `KernelBuilder`."""
        return dict(_compilations())

    def _target(self, name: str) -> Target:
        if name not in self._targets:
            raise ConfigError(f"there is no target {name!r}; choose one of {', '.join(self._targets)}", field="target")
        return self._targets[name]


@cache
def _compilations() -> Counter[str]:
    """Kernels that are compiled from now on, by name: counted once, however many packages' builders ask."""
    import triton

    counts = Counter[str]()
    before = triton.knobs.compilation.listener

    def listen(*, src: Any, cache_hit: bool, **more: Any) -> None:
        if before is not None:
            before(src=src, cache_hit=cache_hit, **more)
        if not cache_hit:
            counts[src.name] += 1
            _logger.error(
                "kernel %s was compiled while serving, which made requests wait; quire compile-kernels makes a "
                "folder for --kernel-cache that has it",
                src.name,
            )

    triton.knobs.compilation.listener = listen
    return counts


def _build_part(builds: list[Build], target: Target, folder: Path) -> int:
    """How many were new."""
    import triton

    num_new = 0

    def listen(*, cache_hit: bool, **_: Any) -> None:
        nonlocal num_new
        num_new += not cache_hit

    with driver_of(target), triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.manager_class = writing_class(folder)
        triton.knobs.compilation.store_binary_only = True
        triton.knobs.compilation.listener = listen
        for build in builds:
            try:
                build_as_launched(replace(build, kernel=kernel_of(build)))
            except Exception as error:
                what = f"{build.kernel.partition(':')[2]} does not compile for {target.name}"
                raise RuntimeError(f"{what}: {type(error).__name__}: {error}") from None
    return num_new
