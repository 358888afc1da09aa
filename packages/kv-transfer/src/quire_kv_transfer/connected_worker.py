"""The runner's half of tiers and of a connector, as one."""

from __future__ import annotations

from quire_interfaces import KVTransferOutput, KVTransferPlan, KVTransferWorker, RequestConnectorWorker

__all__ = ["ConnectedWorker"]


class ConnectedWorker:
    """Implements `KVTransferWorker`: jobs with negative numbers are the connector's, others the tiers'.

    Args:
        connector: The connector's half; closed with this.
        tiers: That of the tiers; None without any. Closed with this.
    """

    def __init__(self, connector: RequestConnectorWorker, tiers: KVTransferWorker | None = None) -> None:
        self._connector = connector
        self._tiers = tiers
        self._finished: dict[int, list[bool]] = {}
        """Jobs of the connector that have ended and were not acknowledged: a report may be lost with a step."""

    def begin(self, plan: KVTransferPlan) -> None:
        """Start the jobs of a plan."""
        for job_id in plan.acknowledged:
            self._finished.pop(job_id, None)
        loads = [job for job in plan.loads if job.job_id < 0]
        if loads or plan.holds or plan.connector_metadata is not None:
            self._connector.begin(loads, plan.holds, plan.connector_metadata)
        if self._tiers is not None:
            self._tiers.begin(
                KVTransferPlan(
                    loads=[job for job in plan.loads if job.job_id >= 0],
                    stores=plan.stores,
                    acknowledged=plan.acknowledged,
                    waits=plan.waits,
                )
            )

    def poll(self, waits: bool = False) -> KVTransferOutput | None:
        """What has ended."""
        news = None if self._tiers is None else self._tiers.poll(waits)
        self._finished.update(self._connector.get_finished(waits and news is None and not self._finished))
        late = self._connector.late_loads()
        if not self._finished and not late:
            return news
        news = news or KVTransferOutput()
        news.finished.update(self._finished)
        news.late.extend(late)
        return news

    def close(self) -> None:
        """End both halves."""
        self._connector.close()
        if self._tiers is not None:
            self._tiers.close()
