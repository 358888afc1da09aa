"""Names of the managers that bring tokens to experts of other ranks. Loads no torch."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["ALL2ALL_BACKENDS", "DEVICE_LIBRARIES", "refusal_of_backend"]

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


def refusal_of_backend(backend: str) -> str:
    """Why there is no manager of a name that has a device library, or of a name that is none."""
    library = DEVICE_LIBRARIES.get(backend)
    if library is None:
        return f"all2all_backend must be one of {', '.join(ALL2ALL_BACKENDS)}, got {backend!r}"
    instead = "take allgather_reducescatter or naive"
    if find_spec(library) is None:
        return f"all2all_backend {backend} needs the library {library}, which is not installed; {instead}"
    return f"all2all_backend {backend} moves rows between GPUs by {library}, which is not built in yet; {instead}"
