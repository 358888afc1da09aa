"""Names of the managers that bring tokens to experts of other ranks. Loads no torch."""

from __future__ import annotations

__all__ = ["ALL2ALL_BACKENDS", "DEVICE_LIBRARIES"]

DEVICE_LIBRARIES = {
    "pplx": "pplx_kernels",
    "deepep_high_throughput": "deep_ep",
    "deepep_low_latency": "deep_ep",
    "mori": "mori",
    "nixl_ep": "nixl_ep",
    "flashinfer_all2allv": "flashinfer",
    "flashinfer_nvlink_two_sided": "flashinfer",
    "flashinfer_nvlink_one_sided": "flashinfer",
}
"""Name of a manager between GPUs -> the module that it needs."""

ALL2ALL_BACKENDS = ("naive", "allgather_reducescatter", *DEVICE_LIBRARIES)
"""vLLM's names."""
