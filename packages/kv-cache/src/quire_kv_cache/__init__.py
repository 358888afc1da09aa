"""Paged KV cache bookkeeping: block pool, prefix index, hybrid groups, eviction, events."""

__version__ = "0.1.0"

__all__: list[str] = []
