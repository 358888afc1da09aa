"""`RoutedExpertsRunner`: a runner whose results tell which experts the routers chose for each token."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from quire_interfaces.kv_cache import KVCachePlan
from quire_interfaces.step import ModelRunnerOutput, SchedulerOutput
from quire_models import Network
from quire_models.layers.recorded_experts import ExpertRecorder
from quire_runner.config import RunnerConfig
from quire_runner.output import PendingResult
from quire_runner.protocols import RunnableNetwork
from quire_runner.runner import ModelRunner

__all__ = ["RoutedExpertsRunner"]


class RoutedExpertsRunner(ModelRunner):
    """Layers run op by op, and no step is captured in a graph: each layer's choice is taken down beside it.

    Raises:
        ConfigError: As `ModelRunner`, or the network has no routers that could be asked.
    """

    def __init__(self, network: RunnableNetwork, plan: KVCachePlan, config: RunnerConfig, **options: Any) -> None:
        self._recorder = ExpertRecorder(cast("Network", network))
        super().__init__(network, plan, dataclasses.replace(config, enforce_eager=True), **options)

    def _run(self, output: SchedulerOutput) -> PendingResult:
        self._recorder.begin()
        pending, experts = super()._run(output), self._recorder.take()
        if experts is None:
            return pending
        sizes = output.num_scheduled_tokens
        assert len(experts) == sum(sizes), f"experts of {len(experts)} tokens, {sum(sizes)} were computed"

        def finish() -> ModelRunnerOutput:
            result, of_rows = pending(), experts.cpu().split(sizes)
            result.routed_experts = {
                row: part.numpy().tobytes() for row, part in zip(output.rows, of_rows, strict=True)
            }
            return result

        return finish
