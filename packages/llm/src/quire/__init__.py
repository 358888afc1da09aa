"""LLM inference and serving: the public Python API."""

__version__ = "0.1.0"

__all__: list[str] = []
