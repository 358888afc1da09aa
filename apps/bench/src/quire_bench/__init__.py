"""Benchmarks: throughput, latency, serving, against peers."""

__version__ = "0.1.0"

__all__: list[str] = []
