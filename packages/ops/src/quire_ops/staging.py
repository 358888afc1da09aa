"""Numbers on their way between host and device, without either waiting for the other.

A copy waits for the device unless its host side is in pinned memory, and a result waits for everything that was
launched before it is asked for unless it is copied beside. These functions are the places where a step's numbers
cross; on the CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_interfaces.platforms import platform_of_type

__all__ = ["copy_to_host", "fill_on_device", "to_device"]

Read = Callable[[], tuple[Tensor, ...]]
"""Waits for copies, and gives them: tensors in host memory. To be called once."""


def to_device(values: NDArray[np.generic] | Sequence[int], device: torch.device) -> Tensor:
    """The values as a tensor on `device`: of an array its dtype, of a list int64. Shares memory with an array on the
    CPU; elsewhere the array may be changed as soon as this returns."""
    host = torch.from_numpy(np.asarray(values, dtype=None if isinstance(values, np.ndarray) else np.int64))
    if not platform_of_type(device.type).pins_memory:
        return host.to(device)
    staged = torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
    # torch keeps the pinned memory from being used anew until the copy has been made.
    return staged.copy_(host).to(device, non_blocking=True)


def fill_on_device(target: Tensor, values: NDArray[np.generic]) -> None:
    """Write the values into a tensor of their shape and dtype; the array may be changed as soon as this returns."""
    host = torch.from_numpy(values)
    if platform_of_type(target.device.type).pins_memory:
        staged = torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
        host = staged.copy_(host)
    target.copy_(host, non_blocking=True)


def copy_to_host(*tensors: Tensor) -> Read:
    """Begin to copy tensors of one device, as they are now in the order of its work. They may not be written to before
    they have been read; on the CPU they are what is read."""
    device = tensors[0].device if tensors else torch.device("cpu")
    platform = platform_of_type(device.type)
    if not platform.module:
        return lambda: tensors
    runtime, copies = platform.runtime(), _copy_stream(device)
    copies.wait_stream(runtime.current_stream(device))
    with runtime.stream(copies):
        hosts = tuple(torch.empty(each.shape, dtype=each.dtype, pin_memory=platform.pins_memory) for each in tensors)
        for host, each in zip(hosts, tensors, strict=True):
            host.copy_(each, non_blocking=True)
        done = copies.record_event()

    def read(sources: tuple[Tensor, ...] = tensors) -> tuple[Tensor, ...]:  # their memory is not used anew before
        done.synchronize()
        return hosts

    return read


@cache
def _copy_stream(device: torch.device) -> Any:
    return platform_of_type(device.type).runtime().Stream(device)
