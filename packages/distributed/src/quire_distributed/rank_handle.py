"""`RankHandle`: a rank beside rank 0 as rank 0 sees it, wherever it runs. Knows a channel; starts nothing."""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from quire_distributed.messages import Channel
from quire_interfaces import KVTransferOutput, RankDeadError
from quire_interfaces.step import ModelRunnerOutput, SchedulerOutput

__all__ = ["AGREE_S", "MergeTransfers", "RankEnd", "RankHandle", "end_of_process"]

AGREE_S = 1.0
"""How long the ranks may take to agree that a step has failed."""

MergeTransfers = Callable[[SchedulerOutput, list[KVTransferOutput | None]], KVTransferOutput | None]
"""(step, what each rank last reported of its parts of blocks) -> the report of all ranks."""


class RankEnd(NamedTuple):
    """Why a rank has ended."""

    cause: str
    """As part of a sentence."""
    signal: str | None = None
    """Name of the signal that ended its process; None where none did, or nobody knows."""


class RankHandle(ABC):
    """A rank that gets what is sent to it, and whose end is known with its cause.

    Args:
        rank: Its number.
        channel: To it.
    """

    def __init__(self, rank: int, channel: Channel) -> None:
        self.rank = rank
        self.on_failure: Callable[[RankDeadError, int | None], None] = lambda failure, step_id: None
        """Called by a thread when the rank has ended, or a step raised on it: with why, and the step."""
        self.on_result: Callable[[ModelRunnerOutput], None] = lambda result: None
        """Called by a thread with what a step gave that was sent as ("result", step)."""
        self._channel = channel
        self._changed = threading.Condition()
        self._errors: dict[int, str | None] = {}
        """Step -> what it raised on this rank; the last steps only."""
        self._answers: dict[int, tuple[Any, str | None]] = {}
        """What a call that was asked for returned, or what it raised, until that is taken."""
        self._num_asked = 0
        self._transfers: KVTransferOutput | None = None
        self._is_ready = False
        self._end: RankDeadError | None = None
        self._is_closing = False
        self._watcher = threading.Thread(target=self._watch, name=f"quire-rank-{self.rank}", daemon=True)

    @abstractmethod
    def _cause_of_end(self) -> RankEnd:
        """Why the rank has ended, whose channel is closed. Called once, by the watching thread."""

    @abstractmethod
    def close(self) -> None:
        """Let the rank end, and end it if it does not."""

    def send(self, message: tuple[Any, ...]) -> None:
        """Send a message.

        Raises:
            RankDeadError: The rank has ended.
        """
        try:
            self._channel.send(message)
        except OSError:
            with self._changed:
                self._changed.wait_for(lambda: self._end is not None, AGREE_S)
            raise self._end or RankDeadError(self.rank, "its process ended") from None

    def ask(self, name: str, *arguments: Any) -> int:
        """Have the rank do a call whose result `answer` gives, by the number that this returns.

        Raises:
            RankDeadError: The rank has ended.
        """
        self._num_asked += 1
        self.send(("ask", self._num_asked, name, arguments))
        return self._num_asked

    def answer(self, number: int) -> Any:
        """The result of a call; waits for it.

        Raises:
            RuntimeError: The call raised.
            RankDeadError: The rank has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: number in self._answers or self._end is not None)
            result, error = self._answers.pop(number, (None, None))
        self.check()
        if error is not None:
            raise RuntimeError(f"rank {self.rank}: {error}")
        return result

    def wait_until_ready(self) -> None:
        """Wait until its runner is built.

        Raises:
            RankDeadError: It could not be, or the rank ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_ready or self._end is not None)
        self.check()

    def tell_failure(self) -> None:
        """Say again that the rank has ended, to an `on_failure` that was set after that."""
        if self._end is not None:
            self.on_failure(self._end, None)

    def wait_for_end(self) -> None:
        """Wait until the rank has ended, and it is known why."""
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None)

    def check(self) -> None:
        """Raise why the rank is gone, if it is."""
        if self._end is not None:
            raise self._end

    def error_of(self, step_id: int) -> str | None:
        """What a step raised on this rank; None for nothing. Waits for its end.

        Raises:
            RankDeadError: It goes on computing, or has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: step_id in self._errors or self._end is not None, AGREE_S)
            if step_id in self._errors:
                return self._errors[step_id]
        self.check()
        raise RankDeadError(self.rank, f"it went on with step {step_id}, which failed on rank 0")

    def transfers_of(self, output: SchedulerOutput) -> KVTransferOutput | None:
        """What the rank last reported of its parts of blocks on their way; with the step itself, where it waits for
        them."""
        with self._changed:
            if output.kv_transfer is not None and output.kv_transfer.waits:
                self._changed.wait_for(lambda: output.step_id in self._errors or self._end is not None)
            return self._transfers

    def _watch(self) -> None:
        try:
            while True:
                self._take(self._channel.receive())
        except EOFError:
            end = self._cause_of_end()
        with self._changed:
            self._end = self._end or RankDeadError(self.rank, *end)
            self._changed.notify_all()
        if not self._is_closing:
            self.on_failure(self._end, None)

    def _take(self, message: tuple[Any, ...]) -> None:
        failure: tuple[RankDeadError, int] | None = None
        if message[0] == "result":
            self.on_result(message[1])
            return
        with self._changed:
            match message:
                case ("ready",):
                    self._is_ready = True
                case ("failed", str(cause)):
                    self._end = RankDeadError(self.rank, f"it could not start: {cause}")
                case ("answer", int(number), result, error):
                    self._answers[number] = result, error
                case ("done", int(step_id), error, transfers):
                    self._errors[step_id], self._transfers = error, transfers
                    for old in [each for each in self._errors if each < step_id - 8]:
                        del self._errors[old]
                    if error is not None:
                        failure = RankDeadError(self.rank, f"step {step_id} failed there alone: {error}"), step_id
            self._changed.notify_all()
        if failure is not None:
            self.on_failure(*failure)


def end_of_process(returncode: int) -> RankEnd:
    """How a rank's process ended, by its exit status (negative: the signal's number)."""
    if returncode >= 0:
        return RankEnd(f"its process ended with exit status {returncode}")
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    return RankEnd(f"its process was ended by {name}", name)
