"""A platform of four devices that are pretended: the CPU computes, and gloo does what NCCL is asked for.

As a package with an entry point, so that ranks in processes of their own find it. Everything that asks whether
tensors are on a device is told that those on the CPU are. Each process notes its devices, and what it asks of NCCL.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quire_interfaces import platforms
from quire_interfaces.platforms import CPU, Platform

__all__ = ["PRETENDED", "pretended_devices"]

NOTES = "PRETENDED_NOTES"
"""Variable with the folder of the notes: a file of each process."""
FREE_BYTES = (1 << 32, 3 << 30, 1 << 32, 1 << 32)


def note(*what: object) -> None:
    """Add a line to the notes of this process."""
    with (Path(os.environ[NOTES]) / str(os.getpid())).open("a") as file:
        print(*what, file=file)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pretended(Platform):
    @property
    def is_host(self) -> bool:
        return False

    def torch_device(self, device: str) -> str:
        pretend_nccl()
        return "cpu"

    def free_bytes(self, device: str) -> int | None:
        note("asked", device)
        return FREE_BYTES[int(device.partition(":")[2] or 0)]


PRETENDED = _Pretended(
    name="pretended", device_type="cpu", module=__name__, distributed_backend="nccl", dtypes=("float32", "bfloat16")
)
if __name__ == "llm_pretended_devices" and NOTES in os.environ:
    platforms._of_types["cpu"] = PRETENDED


def is_available() -> bool:
    return True


def device_count() -> int:
    return len(FREE_BYTES)


def get_device_properties(index: int) -> Any:
    return type("Properties", (), {"name": f"pretended {index}", "total_memory": FREE_BYTES[index]})


def set_device(index: int) -> None:
    note("device", index)


class Stream:
    """Work is done when a call returns."""

    def __init__(self, device: object = None) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None:
        pass


class Event:
    """Of a stream, which has done all its work."""

    def record(self, stream: Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


current_stream = Stream
stream = nullcontext


def pretend_nccl() -> None:
    """Have gloo do what NCCL is asked for in this process, and nothing where torch is told of a stream."""
    import torch
    import torch.distributed as dist

    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign]  # of tensors on the CPU

    class Nccl:
        Options = dist.ProcessGroupNCCL.Options

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, options._timeout)

        def __getattr__(self, name: str) -> Any:
            call = getattr(self._gloo, name)

            def noted(*arguments: Any) -> Any:
                note("nccl", name)
                return call(*arguments)

            return noted

    Nccl.__module__ = __name__
    if dist.ProcessGroupNCCL.__module__ != __name__:
        dist.ProcessGroupNCCL = Nccl  # type: ignore[misc]  # builds for CPUs have none


class Notes:
    """What the processes of a test have noted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, pids: Sequence[int], kind: str) -> list[set[str]]:
        """Of each process, what it noted of a kind."""
        lines = [(self._folder / str(pid)).read_text().splitlines() for pid in pids]
        return [{line.partition(" ")[2] for line in each if line.startswith(f"{kind} ")} for each in lines]


def pretended_devices(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Notes]:
    """Install the platform for a test, and the processes that it starts."""
    import torch
    import torch.distributed as dist

    notes, installed = folder / "notes", folder / "site" / "pretended-1.0.dist-info"
    notes.mkdir()
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: pretended\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[quire.platforms]\npretended = llm_pretended_devices:PRETENDED\n")
    patch.setenv(NOTES, str(notes))
    patch.syspath_prepend(str(installed.parent))
    patch.syspath_prepend(str(Path(__file__).parent))
    paths = [str(installed.parent), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    patch.setenv("PYTHONPATH", os.pathsep.join(paths))
    patch.setitem(platforms._of_types, "cpu", CPU)
    patch.setitem(sys.modules, "llm_pretended_devices", sys.modules[__name__])
    patch.setattr(dist, "ProcessGroupNCCL", dist.ProcessGroupNCCL)
    patch.setattr(torch.Tensor, "record_stream", torch.Tensor.record_stream)
    platforms._of_types["cpu"] = PRETENDED
    yield Notes(notes)
