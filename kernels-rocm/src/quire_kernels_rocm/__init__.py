"""Triton kernels for AMD GPUs, found through the entry point group `quire.ops`."""

__version__ = "0.1.0"

__all__: list[str] = []
