"""Prometheus metrics of the engine, and how its log looks. No torch, no web framework."""

from quire_observability.engine_metrics import CONTENT_TYPE, EngineMetrics, RequestTimes, current_requests
from quire_observability.histogram import Histogram
from quire_observability.logs import configure_logging, current_request_id
from quire_observability.throughput import ThroughputLog

__version__ = "0.1.0"

__all__ = [
    "CONTENT_TYPE",
    "EngineMetrics",
    "Histogram",
    "RequestTimes",
    "ThroughputLog",
    "configure_logging",
    "current_request_id",
    "current_requests",
]
