"""Prometheus metrics of the engine, and how its log looks. No torch, no web framework."""

from quire_observability.engine_metrics import CONTENT_TYPE, EngineMetrics, current_requests
from quire_observability.histogram import Histogram
from quire_observability.logs import TraceIds, configure_logging, current_request_id, current_trace
from quire_observability.request_explanation import explain_request
from quire_observability.request_log import LoggedRequest, RequestLog, RequestTimes
from quire_observability.spans import SpanRecord, current_spans, span
from quire_observability.throughput import ThroughputLog

__version__ = "0.1.0"

__all__ = [
    "CONTENT_TYPE",
    "EngineMetrics",
    "Histogram",
    "LoggedRequest",
    "RequestLog",
    "RequestTimes",
    "SpanRecord",
    "ThroughputLog",
    "TraceIds",
    "configure_logging",
    "current_request_id",
    "current_requests",
    "current_spans",
    "current_trace",
    "explain_request",
    "span",
]
