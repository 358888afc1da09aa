"""What `quire_distributed` finds a kernel package's groups of ranks in shared memory by: a module of this name."""

from quire_kernels_cpu.builds import library as kernels

__all__ = ["kernels"]
