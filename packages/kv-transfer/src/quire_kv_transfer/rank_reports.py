"""What the ranks of one engine report of blocks on their way, as one report.

Each rank keeps its own part of every block, under keys of its own: a block is there when each rank has its part. Knows
jobs and reports; knows no rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire_interfaces import BlockKey, KVTransferJob, KVTransferOutput, KVTransferPlan

__all__ = ["RankReports"]


class RankReports:
    """Merges the reports of a step.

    Args:
        discard: Called with each block of which the first rank has its part and another one has not: it is to be stored
            anew when it has been computed.
    """

    def __init__(self, discard: Callable[[BlockKey], None]) -> None:
        self._discard = discard
        self._loads: dict[int, KVTransferJob] = {}
        """Loads of tiers that not all ranks have reported."""

    def merged(
        self, plan: KVTransferPlan | None, reports: Sequence[KVTransferOutput | None]
    ) -> KVTransferOutput | None:
        """The report of all ranks; None where there is nothing to say.

        A job has ended when it has on every rank, and a block of it arrived when it did on every rank. A load is late
        where it is on one rank, and the tiers are switched off where one rank's are.

        Args:
            plan: What the step asked for.
            reports: Of each rank the last one, which has all of its jobs that were not acknowledged.
        """
        if plan is not None:
            self._loads.update((job.job_id, job) for job in plan.loads if job.job_id >= 0)
        known = [report for report in reports if report is not None]
        if not known:
            return None
        finished: dict[int, list[bool]] = {}
        for job_id, own in known[0].finished.items():
            each = [report.finished[job_id] for report in known if job_id in report.finished]
            if len(each) == len(reports):
                finished[job_id] = [all(parts) for parts in zip(*each, strict=True)]
                self._discard_lost(job_id, own, finished[job_id])
        late = dict.fromkeys(job_id for report in known for job_id in report.late if job_id not in finished)
        is_stopped = any(report.stopped for report in known)
        if not (finished or late or is_stopped):
            return None
        return KVTransferOutput(finished=finished, late=list(late), stopped=is_stopped)

    def _discard_lost(self, job_id: int, own: Sequence[bool], arrived: Sequence[bool]) -> None:
        job = self._loads.pop(job_id, None)
        if job is not None:
            for block, is_own, has_arrived in zip(job.blocks, own, arrived, strict=True):
                if is_own and not has_arrived:
                    self._discard(block.key)
