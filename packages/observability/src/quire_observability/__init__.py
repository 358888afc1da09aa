"""Prometheus metrics of the engine. No torch, no web framework."""

from quire_observability.engine_metrics import CONTENT_TYPE, EngineMetrics, RequestTimes
from quire_observability.histogram import Histogram

__version__ = "0.1.0"

__all__ = ["CONTENT_TYPE", "EngineMetrics", "Histogram", "RequestTimes"]
