"""Batches and files in the server's Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire_server.batches.batch_runner import BatchRunner

__all__ = ["STATUSES", "BatchMetrics"]

STATUSES = (
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled",
)  # fmt: skip
"""States of a batch."""


class BatchMetrics(Collector):
    """What a runner has done, and what it has before it.

    Args:
        prefix: First part of the names.
        runner: Whose figures they are.
    """

    def __init__(self, prefix: str, runner: BatchRunner) -> None:
        self._prefix, self._runner = prefix, runner

    def describe(self) -> Iterable[Metric]:
        """Nothing beforehand."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All of them as of the runner's last look, a second ago at most."""
        runner, counts = self._runner, self._runner.counts
        batches = GaugeMetricFamily(f"{self._prefix}:batches", "Batches that are kept, by state.", labels=["status"])
        for status in STATUSES:
            batches.add_metric([status], runner.num_by_status.get(status, 0))
        yield batches
        lines = CounterMetricFamily(
            f"{self._prefix}:batch_requests", "Lines of batches that were answered, by result.", labels=["result"]
        )
        for result, count in counts.num_lines.items():
            lines.add_metric([result], count)
        yield lines
        yield self._gauge("batch_requests_running", "Lines of batches that are being answered.", runner.slots.num_taken)
        yield CounterMetricFamily(
            f"{self._prefix}:batch_request_retries",
            "Times that a line was tried again, for the server could not answer.",
            value=counts.num_retries,
        )
        yield CounterMetricFamily(
            f"{self._prefix}:batch_requests_displaced",
            "Times that a line made way for other requests, and began again later.",
            value=runner.slots.num_displaced,
        )
        yield self._gauge("files", "Files that are kept.", runner.num_files[0])
        yield self._gauge("files_bytes", "Bytes of these files.", runner.num_files[1])

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return GaugeMetricFamily(f"{self._prefix}:{name}", text, value=value)
