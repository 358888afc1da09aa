"""A rank beside rank 0, in a process of its own: started by `executor.RankProcess`, ends with it.

It builds its runner with the function that it is told of, then runs every step that rank 0 runs. What a step produced
stays here: every rank computes the same. Knows no network; loads torch when its runner does.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import quire_distributed
from quire_distributed.collectives import Collectives
from quire_distributed.messages import Channel
from quire_interfaces import KVTransferOutput, RankDeadError
from quire_interfaces.step import ModelRunnerOutput, SchedulerOutput

__all__ = [
    "BuildWorker",
    "RankSpec",
    "SharedMemoryGroup",
    "TorchGroup",
    "Worker",
    "die_with",
    "main",
    "run_rank",
    "serve",
]

_PR_SET_PDEATHSIG = 1


class Worker(Protocol):
    """What a rank runs steps with."""

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; raises what computing it raised."""

    def call(self, name: str, *arguments: Any) -> Any:
        """Do what rank 0 has done between two steps: a name that both know. Rank 0 gets the result if it asked."""

    def close(self) -> None:
        """Give all memory back."""


BuildWorker = Callable[[Any, Collectives], Worker]
"""(payload of the spec, collectives of this rank) -> its worker."""


class SharedMemoryGroup(NamedTuple):
    """A group of processes of one host."""

    address: str
    """`SharedMemoryRendezvous.address`, as the rank finds it."""


class TorchGroup(NamedTuple):
    """A group of processes of several hosts."""

    master_addr: str
    master_port: int
    silence_s: float
    """How long nothing may be heard of a rank before it counts as gone."""


class RankSpec(NamedTuple):
    """What a rank is told first."""

    rank: int
    size: int
    build: str
    """A `BuildWorker` as "module:function"."""
    payload: Any
    """For that function; pickled."""
    group: SharedMemoryGroup | TorchGroup
    """Where it meets the others."""
    sys_path: list[str]


def main(channel_fd: int, parent_pid: int) -> int:
    """Serve until rank 0 is gone; the exit status.

    Args:
        channel_fd: File descriptor of the socket to the process that started this one.
        parent_pid: That process.
    """
    if not die_with(parent_pid):
        return 1
    channel = Channel(socket.socket(fileno=channel_fd))
    return run_rank(channel.receive(), channel)


def die_with(parent_pid: int) -> bool:
    """End when the process that started this one does, and by no signal to both; whether it is still there."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before that
        return False
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return True


def run_rank(spec: RankSpec, channel: Channel) -> int:
    """Be a rank until rank 0 says so, or is gone; the exit status.

    Args:
        spec: Which one.
        channel: To rank 0.
    """
    sys.path.extend(path for path in spec.sys_path if path not in sys.path)
    try:
        worker = _build(spec)
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            channel.send(("failed", f"{type(error).__name__}: {error}"))
        return 1
    try:
        channel.send(("ready",))
        serve(worker, channel)
    except (EOFError, OSError):  # rank 0 is gone
        return 1
    except RankDeadError:
        traceback.print_exc()
        sys.stderr.flush()
        # At the end of a program torch's destructors may wait for ranks, which have nothing more to say.
        os._exit(1)
    return 0


def _build(spec: RankSpec) -> Worker:
    collectives = _join(spec)
    module, _, name = spec.build.partition(":")
    build: BuildWorker = getattr(importlib.import_module(module), name)
    return build(spec.payload, collectives)


def _join(spec: RankSpec) -> Collectives:
    group = spec.group
    if isinstance(group, SharedMemoryGroup):
        return quire_distributed.SharedMemoryCollectives(group.address, spec.rank, spec.size)
    rendezvous = quire_distributed.TorchRendezvous(group.master_addr, group.master_port, spec.rank, spec.size)
    return rendezvous.group("ranks", range(spec.size), silence_s=group.silence_s)


def serve(worker: Worker, channel: Channel) -> None:
    """Do as rank 0 says until it says to close.

    Raises:
        EOFError, OSError: Rank 0 is gone.
        RankDeadError: Another rank is gone.
    """
    while True:
        match channel.receive():
            case ("step", SchedulerOutput() as output):
                channel.send(_done(output, *_outcome(worker, output)))
            case ("result", SchedulerOutput() as output):  # a step whose result rank 0 does not compute itself
                result, error = _outcome(worker, output)
                if result is not None:
                    channel.send(("result", result))
                channel.send(_done(output, result, error))
            case ("call", name, arguments):
                worker.call(name, *arguments)
            case ("ask", number, name, arguments):
                channel.send(("answer", number, *_answer(worker, name, arguments)))
            case ("close",):
                worker.close()
                return


def _answer(worker: Worker, name: str, arguments: tuple[Any, ...]) -> tuple[Any, str | None]:
    """What a call returned, or what it raised, in words."""
    try:
        return worker.call(name, *arguments), None
    except RankDeadError:
        raise
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _done(
    output: SchedulerOutput, result: ModelRunnerOutput | None, error: str | None
) -> tuple[str, int, str | None, KVTransferOutput | None]:
    """The end of a step, as rank 0 is told: what it raised, and what became of this rank's parts of blocks."""
    return "done", output.step_id, error, None if result is None else result.kv_transfer


def _outcome(worker: Worker, output: SchedulerOutput) -> tuple[ModelRunnerOutput | None, str | None]:
    """Run a step. What it gave, or what it raised, in words."""
    try:
        return worker.run(output), None
    except RankDeadError:
        raise
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
