"""`MultiprocExecutor`: rank 0 of an engine here, the other ranks in processes that it starts; each step on all of them.

Every rank has a runner of its own, gets each `SchedulerOutput`, and samples for itself: what they gather has the same
bits on all. A rank that ends takes the engine with it, which says why: who restarts engines restarts all ranks. Knows
processes and steps; knows no network, and loads no torch.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from quire_distributed.collectives import Collectives
from quire_distributed.messages import Channel
from quire_distributed.worker import RankSpec
from quire_interfaces import RankDeadError
from quire_interfaces.step import ModelRunnerOutput, SchedulerOutput

__all__ = ["MultiprocExecutor", "RankProcess", "RunsRank", "start_ranks"]

_AGREE_S = 1.0
"""How long the ranks may take to agree that a step has failed."""
_CLOSE_S = 5.0
"""How long a rank may take to give its memory back before it is ended."""


class RunsRank(Protocol):
    """Rank 0's runner."""

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; raises what computing it raised."""

    def close(self) -> None:
        """Give all memory back."""


class RankProcess:
    """A rank in a process of its own.

    Args:
        spec: What it is.
    """

    def __init__(self, spec: RankSpec) -> None:
        self.rank = spec.rank
        self.on_failure: Callable[[RankDeadError, int | None], None] = lambda failure, step_id: None
        """Called by a thread when the process has ended, or a step raised on this rank: with why, and the step."""
        self._changed = threading.Condition()
        self._errors: dict[int, str | None] = {}
        """Step -> what it raised on this rank; the last steps only."""
        self._is_ready = False
        self._end: RankDeadError | None = None
        self._is_closing = False
        own, theirs = socket.socketpair()
        code = (
            f"import sys; from quire_distributed.worker import main; sys.exit(main({theirs.fileno()}, {os.getpid()}))"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(), spec.group_fd)
            )
        self._channel = Channel(own)
        self._channel.send(spec)
        self._watcher = threading.Thread(target=self._watch, name=f"quire-rank-{self.rank}", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def send(self, message: tuple[Any, ...]) -> None:
        """Send a message.

        Raises:
            RankDeadError: The process has ended.
        """
        try:
            self._channel.send(message)
        except OSError:
            with self._changed:
                self._changed.wait_for(lambda: self._end is not None, _AGREE_S)
            raise self._end or RankDeadError(self.rank, "its process ended") from None

    def wait_until_ready(self) -> None:
        """Wait until its runner is built.

        Raises:
            RankDeadError: It could not be, or the process ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_ready or self._end is not None)
        self.check()

    def wait_for_end(self) -> None:
        """Wait until the process has ended, and it is known why."""
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None)

    def check(self) -> None:
        """Raise why the rank is gone, if it is."""
        if self._end is not None:
            raise self._end

    def error_of(self, step_id: int) -> str | None:
        """What a step raised on this rank; None for nothing. Waits for its end.

        Raises:
            RankDeadError: It goes on computing, or the process ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: step_id in self._errors or self._end is not None, _AGREE_S)
            if step_id in self._errors:
                return self._errors[step_id]
        self.check()
        raise RankDeadError(self.rank, f"it went on with step {step_id}, which failed on rank 0")

    def close(self) -> None:
        """Let the process end, and end it if it does not."""
        self._is_closing = True
        try:
            self._channel.send(("close",))
            self._process.wait(_CLOSE_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
        self._process.wait()
        self._channel.close()
        self._watcher.join()

    def _watch(self) -> None:
        try:
            while True:
                self._take(self._channel.receive())
        except EOFError:
            self._process.wait()
        with self._changed:
            self._end = self._end or RankDeadError(self.rank, _exit_text(self._process.returncode))
            self._changed.notify_all()
        if not self._is_closing:
            self.on_failure(self._end, None)

    def _take(self, message: tuple[Any, ...]) -> None:
        failure: tuple[RankDeadError, int] | None = None
        with self._changed:
            match message:
                case ("ready",):
                    self._is_ready = True
                case ("failed", str(cause)):
                    self._end = RankDeadError(self.rank, f"it could not start: {cause}")
                case ("done", int(step_id), error):
                    self._errors[step_id] = error
                    for old in [each for each in self._errors if each < step_id - 8]:
                        del self._errors[old]
                    if error is not None:
                        failure = RankDeadError(self.rank, f"step {step_id} failed there alone: {error}"), step_id
            self._changed.notify_all()
        if failure is not None:
            self.on_failure(*failure)


def _exit_text(returncode: int) -> str:
    if returncode >= 0:
        return f"its process ended with exit status {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    return f"its process was ended by {name}"


def start_ranks(size: int, build: str, payloads: Sequence[Any], group_fd: int) -> list[RankProcess]:
    """Start the ranks beside rank 0; returns at once.

    Args:
        size: Number of ranks, rank 0 counted.
        build: A `quire_distributed.worker.BuildWorker` as "module:function".
        payloads: What it is given, for ranks 1, 2, ...
        group_fd: Shared memory of the ranks (`SharedMemoryRendezvous.fd`).
    """
    return [
        RankProcess(RankSpec(rank, size, build, payload, group_fd, list(sys.path)))
        for rank, payload in enumerate(payloads, start=1)
    ]


class MultiprocExecutor:
    """Runs each step on rank 0 in the caller's thread, and at the same time on the other ranks (an `Executor`).

    Args:
        runner: Rank 0's; closed with this.
        ranks: The others, ready.
        collectives: Rank 0's end of their group; closed with this.
    """

    def __init__(self, runner: RunsRank, ranks: Sequence[RankProcess], collectives: Collectives) -> None:
        self._runner, self._ranks, self._collectives = runner, ranks, collectives
        self._step_id: int | None = None
        """The step that runs."""
        self._is_closed = False
        self.before_step: Callable[[SchedulerOutput], None] = lambda output: None
        """Called before each step; may `call` what the other ranks need for it."""
        for rank in ranks:
            rank.on_failure = self._on_failure

    def execute(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Run one step; the future is done. It has RankDeadError where a rank is gone: the engine cannot go on."""
        future: Future[ModelRunnerOutput] = Future()
        try:
            future.set_result(self._run(output))
        except Exception as error:
            future.set_exception(error)
        return future

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.before_step(output)
        for rank in self._ranks:
            rank.check()
            rank.send(("step", output))
        self._step_id = output.step_id
        try:
            return self._runner.run(output)
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

    def call(self, name: str, *arguments: Any) -> None:
        """Have the other ranks do what is done here between two steps (`Worker.call`).

        Raises:
            RankDeadError: A rank is gone.
        """
        for rank in self._ranks:
            rank.send(("call", name, arguments))

    def close(self) -> None:
        """End the other ranks and give all memory back. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for rank in self._ranks:
            rank.close()
        self._collectives.close()
        self._runner.close()

    def _cause(self, error: RankDeadError) -> RankDeadError:
        """Why the group is broken: what a process says of its own end, else what the collectives say."""
        deadline_s = time.monotonic() + _AGREE_S
        while time.monotonic() < deadline_s:
            for rank in self._ranks:
                try:
                    rank.check()
                except RankDeadError as cause:
                    return cause
            time.sleep(0.01)
        return error

    def _on_failure(self, failure: RankDeadError, step_id: int | None) -> None:
        """Wake rank 0 where it waits for a rank that is gone, or whose step failed; that may fail on rank 0, too."""
        if self._is_closed:
            return
        if step_id is None:
            self._collectives.abort(failure.cause)
            return

        def abort() -> None:
            if self._step_id == step_id:
                self._collectives.abort(failure.cause)

        timer = threading.Timer(_AGREE_S, abort)
        timer.daemon = True
        timer.start()
