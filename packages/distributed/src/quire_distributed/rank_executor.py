"""`RankExecutor`: what executors of several ranks have in common. Knows ranks and their ends; runs no step."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from quire_distributed.rank_handle import AGREE_S, MergeTransfers, RankHandle
from quire_interfaces import RankDeadError
from quire_interfaces.step import SchedulerOutput

__all__ = ["IDLE_S", "STUCK_S", "RankExecutor"]

IDLE_S = 0.5
"""How long after a rank's death a step may still come that says so."""
STUCK_S = 20.0
"""How long after a rank's death the step that runs may take to raise; then it waits for a device that nothing wakes."""


class RankExecutor(ABC):
    """The ranks beside rank 0, what they are told between steps, and why one is gone.

    Args:
        ranks: Ready, by their numbers.
    """

    def __init__(self, ranks: Sequence[RankHandle]) -> None:
        self._ranks = ranks
        self._is_closed = False
        self.before_step: Callable[[SchedulerOutput], None] = lambda output: None
        """Called before each step; may `call` what the other ranks need for it."""
        self.merge_transfers: MergeTransfers | None = None
        """What makes one report of those of all ranks, where blocks are on their way to or from somewhere."""
        self.on_idle_failure: Callable[[RankDeadError], None] = lambda failure: None
        """Called by a thread when a rank is gone and no step is there that could say so, or the one that runs does not
        end."""

    def _watch(self) -> None:
        """Hear of failures from now on, and of those that were."""
        for rank in self._ranks:
            rank.on_failure = self._on_failure
            rank.tell_failure()

    @abstractmethod
    def _on_failure(self, failure: RankDeadError, step_id: int | None) -> None:
        """A rank is gone, or a step raised there; called by a thread."""

    def call(self, name: str, *arguments: Any) -> None:
        """Have the other ranks do what is done here between two steps (`Worker.call`).

        Raises:
            RankDeadError: A rank is gone.
        """
        for rank in self._ranks:
            rank.send(("call", name, arguments))

    def ask(self, name: str, *arguments: Any) -> Callable[[], list[Any]]:
        """Have the other ranks do a call, while this one goes on; what is returned waits for their results, by rank.

        Raises:
            RankDeadError: A rank is gone.
        """
        numbers = [rank.ask(name, *arguments) for rank in self._ranks]
        return lambda: [rank.answer(number) for rank, number in zip(self._ranks, numbers, strict=True)]

    def _cause(self, failure: RankDeadError) -> RankDeadError:
        """Why the ranks are broken: what a process says of its own end, else what the collectives say."""
        deadline_s = time.monotonic() + AGREE_S
        while time.monotonic() < deadline_s:
            for rank in self._ranks:
                try:
                    rank.check()
                except RankDeadError as cause:
                    return cause
            time.sleep(0.01)
        return failure

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call something later, unless this was closed before."""
        timer = threading.Timer(seconds, lambda: None if self._is_closed else call())
        timer.daemon = True
        timer.start()
