"""C++ kernels for x86-64 and 64-bit Arm processors, found through the entry point group `quire.ops`."""

__version__ = "0.1.0"

__all__: list[str] = []
