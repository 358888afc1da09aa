"""Routed experts returned with outputs: where they are kept from step to step.

A step tells the experts of the tokens that it computed. They are kept by the slots of the KV cache that the same tokens
have, so that whoever finds a prefix in the cache finds its experts there, too. Importing this module loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import quire_runner
from quire.blueprint import Blueprint
from quire.config import QuireConfig
from quire.routed_experts_config import keeps_all_tokens, sparse_layers
from quire_interfaces import (
    EngineCoreOutput,
    FinishReason,
    KVCachePlan,
    ModelRunnerOutput,
    PauseState,
    Request,
    Scheduler,
    SchedulerOutput,
    SchedulerStats,
    TokenExperts,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quire_runner import ModelRunner

__all__ = ["ExpertsScheduler", "runner_class"]


def runner_class(config: QuireConfig) -> type[ModelRunner]:
    """What runs the steps of a rank."""
    if config.model.enable_return_routed_experts:
        return quire_runner.RoutedExpertsRunner
    if config.runner.extract_hidden_states:
        return quire_runner.HiddenStatesRunner
    return quire_runner.ModelRunner if config.parallel.pipeline_parallel_size == 1 else quire_runner.PipelineRunner


class _Row(NamedTuple):
    """A request in its row."""

    blocks: list[int]
    """Of the group whose slots experts are kept by."""
    told: list[int]
    """[tokens that are known, tokens whose experts were told]."""


class ExpertsScheduler:
    """A scheduler whose outputs have the experts of their tokens (`EngineCoreOutput.routed_experts`).

    Args:
        scheduler: Plans and takes in the steps.
        blueprint: The network, whose experts they are, and the plan of its cache.
    """

    def __init__(self, scheduler: Scheduler, blueprint: Blueprint) -> None:
        import numpy as np  # loaded where experts are kept

        layers, plan = sparse_layers(blueprint.model), blueprint.plan.kv_plan
        self._inner = scheduler
        self._group, self._block_size = _group_of_all_tokens(plan)
        self._dtype = "uint8" if max(layer.num_experts for layer in layers) <= 256 else "uint16"
        self._shape = len(layers), layers[0].num_chosen
        # Pages that no token has been kept in take no memory.
        self._slots: NDArray[Any] = np.zeros((plan.num_blocks * self._block_size, *self._shape), dtype=self._dtype)
        self._rows: dict[int, _Row] = {}
        self._steps: dict[int, list[_Row]] = {}
        """Step in flight -> the row of each of its entries, as it was when the step was planned."""

    def schedule(self, only: frozenset[str] | None = None) -> SchedulerOutput | None:
        """Plan the next step, and note whose blocks its tokens go to."""
        output = self._inner.schedule(only)
        if output is None:
            return None
        rows = self._rows
        for row in output.freed_rows:
            rows.pop(row, None)
        for new in output.new_rows:
            rows[new.row] = _Row(list(new.block_ids[self._group]), [len(new.token_ids), 0])
        for row, block_ids in output.new_block_ids.items():
            rows[row].blocks.extend(block_ids[self._group])
        self._steps[output.step_id] = [rows[row] for row in output.rows]
        return output

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Take in what a step produced, and what its tokens chose."""
        import numpy as np

        members = self._steps.pop(output.step_id)
        entries = zip(output.rows, members, output.num_computed_tokens, output.num_scheduled_tokens, strict=True)
        for row, member, start, size in entries:
            data = result.routed_experts.get(row)
            if data is not None:  # else it failed
                experts = np.frombuffer(data, dtype=self._dtype).reshape(size, *self._shape)
                self._slots[self._slots_of(member, start, start + size)] = experts
        of_request = dict(zip(output.request_ids, members, strict=True))
        return [
            self._with_experts(each, of_request[each.request_id]) if each.request_id in of_request else each
            for each in self._inner.update(output, result)
        ]

    def _with_experts(self, output: EngineCoreOutput, row: _Row) -> EngineCoreOutput:
        """An output with the experts of the tokens before its last one that were not told of yet."""
        row.told[0] += len(output.new_token_ids)
        known, told = row.told
        if not output.new_token_ids or known - 1 <= told:
            return output
        row.told[1] = known - 1
        data = self._slots[self._slots_of(row, told, known - 1)].tobytes()
        num_layers, top_k = self._shape
        return output._replace(
            routed_experts=TokenExperts(start=told, num_layers=num_layers, top_k=top_k, dtype=self._dtype, data=data)
        )

    def _slots_of(self, row: _Row, start: int, stop: int) -> NDArray[np.int64]:
        """Slots of the tokens at some positions."""
        import numpy as np

        size = self._block_size
        first = start // size
        blocks = np.array(row.blocks[first : -(-stop // size)], dtype=np.int64)
        slots = (blocks[:, None] * size + np.arange(size)).ravel()
        return slots[start - first * size : stop - first * size]

    def discard_step(self, output: SchedulerOutput) -> None:
        """The step failed: its requests are computed anew."""
        self._steps.pop(output.step_id, None)
        self._inner.discard_step(output)

    def add_request(self, request: Request) -> None:
        """Queue a request."""
        self._inner.add_request(request)

    def abort_requests(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> list[str]:
        """End requests now; the ids that were alive."""
        return self._inner.abort_requests(request_ids, reason)

    def has_requests(self) -> bool:
        """Whether any request waits or runs."""
        return self._inner.has_requests()

    def has_work(self) -> bool:
        """Whether `schedule` could return a step now."""
        return self._inner.has_work()

    def num_requests(self) -> tuple[int, int]:
        """(running, waiting)."""
        return self._inner.num_requests()

    def requests(self) -> list[Request]:
        """All that wait or run."""
        return self._inner.requests()

    def waiting_reason(self, request_id: str) -> str | None:
        """Why a request waits."""
        return self._inner.waiting_reason(request_id)

    def pause(self, state: PauseState) -> None:
        """Hold new requests, or all, or none."""
        self._inner.pause(state)

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget all cached blocks; whether it worked."""
        return self._inner.reset_prefix_cache(preempt_running=preempt_running)

    def stats(self) -> SchedulerStats:
        """Counters and gauges."""
        return self._inner.stats()


def _group_of_all_tokens(plan: KVCachePlan) -> tuple[int, int]:
    """The first group that keeps all tokens, and its block size."""
    index = next(i for i, group in enumerate(plan.groups) if keeps_all_tokens(group.spec))
    return index, plan.groups[index].spec.block_size
