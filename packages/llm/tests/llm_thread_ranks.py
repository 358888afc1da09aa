"""Pipeline stages as threads of this process: what `quire.tensor_parallel_ranks` starts as processes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import quire.assemble
from quire.assemble import build_rank_worker
from quire.config import QuireConfig
from quire.plan import MemoryPlan
from quire.tensor_parallel_ranks import OtherRanks, RankGroups, RankWorker, rank_payloads
from quire_distributed import Collectives, thread_group
from quire_interfaces import ModelRunnerOutput, RankDeadError
from quire_models.config import ModelConfig


class ThreadRank:
    """A rank in a thread, as the executor sees it."""

    def __init__(self, rank: int, build: Callable[[], RankWorker]) -> None:
        self.rank = rank
        self.on_failure: Callable[[RankDeadError, int | None], None] = lambda failure, step_id: None
        self.on_result: Callable[[ModelRunnerOutput], None] = lambda result: None
        self.num_steps = 0
        self._messages: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self._errors: dict[int, str | None] = {}
        self._changed = threading.Condition()
        self._is_ready = False
        self._end: RankDeadError | None = None
        self._thread = threading.Thread(target=self._serve, args=(build,), name=f"rank-{rank}")
        self._thread.start()

    def send(self, message: tuple[Any, ...]) -> None:
        self._messages.put(message)

    def wait_until_ready(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_ready or self._end is not None)
        self.check()

    def check(self) -> None:
        if self._end is not None:
            raise self._end

    def tell_failure(self) -> None:
        pass

    def error_of(self, step_id: int) -> str | None:
        with self._changed:
            assert self._changed.wait_for(lambda: step_id in self._errors, 5.0)
            return self._errors[step_id]

    def close(self) -> None:
        self._messages.put(("close",))
        self._thread.join()

    def _note(self, end: RankDeadError | None = None, **errors: str | None) -> None:
        with self._changed:
            self._is_ready = True
            self._end = self._end or end
            self._errors |= {int(step.removeprefix("step")): error for step, error in errors.items()}
            self._changed.notify_all()

    def _serve(self, build: Callable[[], RankWorker]) -> None:
        try:
            worker = build()
            self._note()
            while (message := self._messages.get())[0] != "close":
                if message[0] == "call":
                    worker.call(message[1], *message[2])
                else:
                    self._step(worker, *message)
            worker.close()
        except Exception as error:
            self._note(RankDeadError(self.rank, str(error)))
            self.on_failure(RankDeadError(self.rank, str(error)), None)

    def _step(self, worker: RankWorker, kind: str, output: Any) -> None:
        self.num_steps += 1
        name = f"step{output.step_id}"
        try:
            result = worker.run(output)
        except RankDeadError:
            raise
        except Exception as error:
            self._note(**{name: f"{type(error).__name__}: {error}"})
            self.on_failure(RankDeadError(self.rank, str(error)), output.step_id)
            return
        if kind == "result":
            self.on_result(result)
        self._note(**{name: None})


@contextmanager
def stages_in_threads() -> Iterator[list[ThreadRank]]:
    """Engines that are built meanwhile have their other stages in threads, which are listed in what this gives."""
    ranks: list[ThreadRank] = []

    def start(config: QuireConfig, folder: Path, model: ModelConfig, plan: MemoryPlan) -> OtherRanks:
        mesh, kv_plans, payloads = rank_payloads(config, model, plan)
        group = thread_group(mesh.world_size)

        def make(rank: int, own: Collectives) -> ThreadRank:
            return ThreadRank(rank, lambda: build_rank_worker(payloads[rank - 1], own))

        ranks.extend(make(rank, group[rank]) for rank in range(1, mesh.world_size))
        handles: Any = ranks  # as the executor sees them
        return OtherRanks(handles, RankGroups.of(group[0], mesh), kv_plans[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quire.assemble, "start_other_ranks", start)
        yield ranks
