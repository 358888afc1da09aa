"""What a package of compiled kernels can do besides serving ops: build ahead of time, ship, and tell what was missing.

Knows no compiler; a package hands out a `KernelBuilder` with its backends (`OpBackend.builder`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

__all__ = ["KernelBuilder"]


class KernelBuilder(Protocol):
    """Builds the kernels of one package."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the GPUs that it builds for: "sm_90"."""

    def recording(self, target: str) -> AbstractContextManager[list[Any]]:
        """Within it the package's backends serve tensors without memory as if this GPU were here, and what they would
        launch is put into the list, each kernel once, and does not run."""

    def build(self, kernels: Sequence[Any], target: str, folder: Path, *, num_processes: int) -> int:
        """Compile recorded kernels into a folder, which may be shipped, and written to by several processes at once.

        Returns:
            How many were not there yet.
        """

    def use(self, folder: Path) -> None:
        """Take kernels from this folder before compiling any.

        Raises:
            ConfigError: it is no such folder, or another version of the compiler wrote it.
        """

    def count_compilations(self) -> Mapping[str, int]:
        """From the first call on, kernels that are compiled are counted, and reported as errors; the counts so far, by
        the kernel's name."""
