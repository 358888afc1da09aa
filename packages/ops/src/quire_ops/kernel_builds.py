"""What a package of compiled kernels can do besides serving ops: build ahead of time, ship, tune, say what was missing.

Knows no compiler; a package hands out a `KernelBuilder` with its backends (`OpBackend.builder`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

__all__ = ["KernelBuilder"]


class KernelBuilder(Protocol):
    """Builds the kernels of one package."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the GPUs that it builds for: "sm_90"."""

    @property
    def has_short_pointers(self) -> bool:
        """Whether kernels for less than 2 GiB of memory differ from those for more: then what a network launches
        depends on how large its KV cache is, and both must be recorded."""

    def recording(self, target: str, gpu: str | None = None) -> AbstractContextManager[list[Any]]:
        """Within it the package's backends serve tensors without memory as if this GPU were here, and what they would
        launch is put into the list, each kernel once, and does not run.

        Args:
            gpu: Name of the GPU ("h200"), if its table of configurations counts.
        """

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

    def noting(self, target: str | None = None) -> AbstractContextManager[list[Any]]:
        """Within it the package's backends serve tensors without memory, and the problems that kernels can be tuned for
        are put into the list. target: None stands for the GPU of this machine."""

    def candidates(self, problem: Any, target: str) -> int:
        """How many configurations of a kernel would be tried for a problem."""

    def tune(self, problems: Sequence[Any], folder: Path, *, num_processes: int, context: int) -> Iterator[str]:
        """Find the fastest configuration for each problem on the GPU of this machine, and write it into its table.

        Args:
            folder: Of tables; what is known about other problems stays.
            context: Tokens of the sequences that are decoded.

        Yields:
            A line about each problem, as soon as it is done.

        Raises:
            ConfigError: there is no GPU, or a table that cannot be read.
        """

    def use_tables(self, folder: Path) -> None:
        """Look for configurations in this folder first.

        Raises:
            ConfigError: it is no folder, or a table in it cannot be read.
        """

    def configurations(self) -> str | None:
        """Where the configurations of kernels come from on the GPU of this machine; None without a GPU."""

    def count_compilations(self) -> Mapping[str, int]:
        """From the first call on, kernels that are compiled are counted, and reported as errors; the counts so far, by
        the kernel's name."""
