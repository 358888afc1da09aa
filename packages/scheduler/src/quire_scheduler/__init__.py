"""Continuous batching scheduler: token budget, admission, preemption, pause states."""

__version__ = "0.1.0"

__all__: list[str] = []
