"""`MultiprocExecutor`: rank 0 of an engine here, the other ranks in processes that it starts; each step on all of them.

Every rank has a runner of its own, gets each `SchedulerOutput`, and samples for itself: what they gather has the same
bits on all. A rank that ends takes the engine with it, which says why: who restarts engines restarts all ranks. Knows
processes and steps; knows no network, and loads no torch.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from quire_distributed.collectives import Collectives
from quire_distributed.messages import Channel
from quire_distributed.rank_executor import IDLE_S, STUCK_S, RankExecutor
from quire_distributed.rank_handle import AGREE_S, RankEnd, RankHandle, end_of_process
from quire_distributed.worker import RankSpec, SharedMemoryGroup
from quire_interfaces import RankDeadError
from quire_interfaces.step import ModelRunnerOutput, SchedulerOutput

__all__ = ["MultiprocExecutor", "RankProcess", "RunsRank", "start_ranks"]

_CLOSE_S = 5.0
"""How long a rank may take to give its memory back before it is ended."""


class RunsRank(Protocol):
    """Rank 0's runner."""

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; raises what computing it raised."""

    def close(self) -> None:
        """Give all memory back."""


class RankProcess(RankHandle):
    """A rank in a process of its own, of this host.

    Args:
        spec: What it is.
        inherited_fds: File descriptors that it gets, beside its channel.
    """

    def __init__(self, spec: RankSpec, inherited_fds: Sequence[int] = ()) -> None:
        own, theirs = socket.socketpair()
        code = (
            f"import sys; from quire_distributed.worker import main; sys.exit(main({theirs.fileno()}, {os.getpid()}))"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(), *inherited_fds)
            )
        super().__init__(spec.rank, Channel(own))
        with contextlib.suppress(OSError):  # it has ended, which the watcher tells
            self._channel.send(spec)
        self._watcher.start()

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def close(self) -> None:
        self._is_closing = True
        try:
            self._channel.send(("close",))
            self._process.wait(_CLOSE_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
        self._process.wait()
        self._channel.close()
        self._watcher.join()

    def _cause_of_end(self) -> RankEnd:
        return end_of_process(self._process.wait())


def start_ranks(size: int, build: str, payloads: Sequence[Any], group_fd: int) -> list[RankProcess]:
    """Start the ranks beside rank 0; returns at once.

    Args:
        size: Number of ranks, rank 0 counted.
        build: A `quire_distributed.worker.BuildWorker` as "module:function".
        payloads: What it is given, for ranks 1, 2, ...
        group_fd: Shared memory of the ranks (`SharedMemoryRendezvous.fd`).
    """
    group = SharedMemoryGroup(f"/proc/self/fd/{group_fd}")
    return [
        RankProcess(RankSpec(rank, size, build, payload, group, list(sys.path)), (group_fd,))
        for rank, payload in enumerate(payloads, start=1)
    ]


class MultiprocExecutor(RankExecutor):
    """Runs each step on rank 0 in the caller's thread, and at the same time on the other ranks (an `Executor`).

    Args:
        runner: Rank 0's; closed with this.
        ranks: The others, ready.
        collectives: Rank 0's end of their group; closed with this.
    """

    def __init__(self, runner: RunsRank, ranks: Sequence[RankHandle], collectives: Collectives) -> None:
        super().__init__(ranks)
        self._runner, self._collectives = runner, collectives
        self._step_id: int | None = None
        """The step that runs."""
        self._num_steps = 0
        self._watch()

    def execute(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Run one step; the future is done. It has RankDeadError where a rank is gone: the engine cannot go on."""
        future: Future[ModelRunnerOutput] = Future()
        try:
            future.set_result(self._run(output))
        except Exception as error:
            future.set_exception(error)
        return future

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self._num_steps += 1
        self.before_step(output)
        for rank in self._ranks:
            rank.check()
            rank.send(("step", output))
        self._step_id = output.step_id
        try:
            result = self._runner.run(output)
            self._collectives.check()
        except RankDeadError as error:
            raise self._cause(error) from error
        except Exception as error:
            # What a request did wrong fails alike on all ranks, which then are as they were.
            for rank in self._ranks:
                if rank.error_of(output.step_id) is None:
                    raise RankDeadError(
                        rank.rank, f"it went on where rank 0 failed with {type(error).__name__}: {error}"
                    ) from error
            raise
        finally:
            self._step_id = None
        if self.merge_transfers is not None:
            reports = [result.kv_transfer, *(rank.transfers_of(output) for rank in self._ranks)]
            result.kv_transfer = self.merge_transfers(output, reports)
        return result

    def close(self) -> None:
        """End the other ranks and give all memory back. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for rank in self._ranks:
            rank.close()
        self._collectives.close()
        self._runner.close()

    def _on_failure(self, failure: RankDeadError, step_id: int | None) -> None:
        """Wake rank 0 where it waits for a rank that is gone, or whose step failed; that may fail on rank 0, too."""
        if self._is_closed:
            return
        if step_id is None:
            num_steps, is_stepping = self._num_steps, self._step_id is not None
            self._collectives.abort(failure.cause)

            def end() -> None:
                if self._num_steps == num_steps and (self._step_id is not None or not is_stepping):
                    self.on_idle_failure(failure)

            self._later(STUCK_S if is_stepping else IDLE_S, end)
            return

        def abort() -> None:
            if self._step_id == step_id:
                self._collectives.abort(failure.cause)

        self._later(AGREE_S, abort)
