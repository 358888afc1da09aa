"""A connector that does what connectors do on bad days: it is slow, loses, and dies, in a reproducible order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from quire_interfaces import BlockMemory, KVTransferJob, Request, RequestConnector, RequestConnectorWorker
from quire_testkit.faulty_tier import Faults

__all__ = ["FaultyConnector", "FaultyWorker"]


class FaultyConnector:
    """A `RequestConnector` between a scheduler and another connector. `Faults.loss` is the share of blocks that are
    said not to have arrived, and are rubbish then; `delay_s` what each report takes longer; while `is_dead`, jobs end
    for nobody, and loads are late. Damage that a connector does not notice, nobody above it can: blocks damaged by
    `corruption` are said not to have arrived.

    Args:
        connector: What it passes on to.
        faults: What goes wrong.
    """

    def __init__(self, connector: RequestConnector, faults: Faults) -> None:
        self._connector = connector
        self.faults = faults

    def check(self, request: Request) -> None:
        """What the connector does."""
        self._connector.check(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """What the connector says, now and then with the second question only."""
        if self.faults.rng.random() < self.faults.loss:
            return None
        return self._connector.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, job: KVTransferJob) -> None:
        """What the connector does."""
        self._connector.update_state_after_alloc(request, job)

    def request_finished(self, request: Request, job: KVTransferJob | None) -> tuple[bool, dict[str, Any] | None]:
        """What the connector does."""
        return self._connector.request_finished(request, job)

    def build_connector_meta(self) -> bytes | None:
        """What the connector does."""
        return self._connector.build_connector_meta()

    def make_worker(self, memory: BlockMemory) -> FaultyWorker:
        """The other half, with the same faults."""
        return FaultyWorker(self._connector.make_worker(memory), memory, self.faults)


class FaultyWorker:
    """A `RequestConnectorWorker` with faults.

    Args:
        worker: What it passes on to.
        memory: The KV cache, to damage.
        faults: What goes wrong.
    """

    def __init__(self, worker: RequestConnectorWorker, memory: BlockMemory, faults: Faults) -> None:
        self._worker = worker
        self._memory = memory
        self._faults = faults
        self._loads: dict[int, KVTransferJob] = {}
        self._delayed: list[tuple[float, int, list[bool]]] = []
        """(when it is reported, job, what arrived)"""

    def begin(self, loads: Sequence[KVTransferJob], holds: Sequence[KVTransferJob], metadata: bytes | None) -> None:
        """What the worker does."""
        self._loads.update((job.job_id, job) for job in loads)
        self._worker.begin(loads, holds, metadata)

    def get_finished(self, waits: bool = False) -> dict[int, list[bool]]:
        """What the worker says, later, and with blocks lost."""
        now_s = time.monotonic()
        for job_id, arrived in self._worker.get_finished(waits and not self._delayed).items():
            job = self._loads.pop(job_id, None)
            if job is not None:
                arrived = [each and not self._loses(job, index) for index, each in enumerate(arrived)]
            self._delayed.append((now_s + self._faults.delay_s, job_id, arrived))
        if self._faults.is_dead:
            return {}
        due = {job_id: arrived for at_s, job_id, arrived in self._delayed if at_s <= now_s}
        self._delayed = [each for each in self._delayed if each[1] not in due]
        return due

    def _loses(self, job: KVTransferJob, index: int) -> bool:
        faults = self._faults
        is_damaged = faults.rng.random() < faults.corruption
        if not is_damaged and faults.rng.random() >= faults.loss:
            return False
        faults.num_corrupted += is_damaged
        faults.num_lost += not is_damaged
        block = job.blocks[index]
        for buffer in self._memory.buffers(block.key.group, block.block_id):
            buffer[:] = faults.rng.randbytes(len(buffer))
        return True

    def late_loads(self) -> list[int]:
        """What the worker says; all loads, while it is dead."""
        if self._faults.is_dead:
            return [*self._loads, *(job_id for _, job_id, arrived in self._delayed if arrived)]
        return self._worker.late_loads()

    def close(self) -> None:
        """What the worker does."""
        self._worker.close()
