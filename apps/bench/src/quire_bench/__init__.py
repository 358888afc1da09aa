"""Benchmarks: throughput, latency, serving, against peers; and random checkpoints to run them on."""

from quire_bench.workload import BenchRequest, Workload, random_requests

__version__ = "0.1.0"

__all__ = ["BenchRequest", "Workload", "random_requests"]
