"""A worker whose step is one sum over the ranks, for tests of the executor; it fails as the step's request asks."""

from __future__ import annotations

import threading
from typing import Any

import torch

from quire_distributed import Collectives
from quire_interfaces.step import ModelRunnerOutput, SchedulerOutput


class CountingWorker:
    """Sums (rank + 1) * step_id over the ranks in each step."""

    def __init__(self, factor: int, collectives: Collectives) -> None:
        self._factor, self._collectives = factor, collectives
        self.ends = threading.Event()
        """Set, a step ends that does not."""

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        if "fails on all" in output.request_ids:
            raise ValueError("a step that fails")
        if "fails on one" in output.request_ids and self._collectives.rank:
            raise ValueError("a step that fails there")
        own = torch.tensor([(self._collectives.rank + 1) * output.step_id * self._factor])
        total = int(self._collectives.all_reduce(own))
        if "a rank goes" in output.request_ids:  # as where a device gives something when a rank is gone
            self._collectives.abort("its device failed")
        if "does not end" in output.request_ids and not self._collectives.rank:
            self.ends.wait(20)
        return ModelRunnerOutput(step_id=output.step_id, sampled_token_ids=[[total]])

    def call(self, name: str, *arguments: Any) -> Any:
        if name == "rank_times":
            return self._collectives.rank * arguments[0]
        if name == "fail":
            raise ValueError("a call that fails")
        assert name == "set_factor"
        (self._factor,) = arguments
        return None

    def close(self) -> None:
        pass


def build(payload: Any, collectives: Collectives) -> CountingWorker:
    if payload is None:
        raise ValueError("there is nothing to build")
    return CountingWorker(payload, collectives)
