"""Conformance suites, tiny checkpoints and a fake executor (development only)."""

__version__ = "0.1.0"

__all__: list[str] = []
