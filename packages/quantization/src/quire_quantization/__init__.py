"""Linear methods: plain and quantized weights."""

__version__ = "0.1.0"

__all__: list[str] = []
