"""The arrays of prepared media, in the files that they were written to."""

from __future__ import annotations

import mmap
from math import prod

import torch
from torch import Tensor

from quire_interfaces.media import MediaItem

__all__ = ["read_arrays"]


def read_arrays(item: MediaItem) -> dict[str, Tensor]:
    """The arrays of an item, by name, where they lie in its file: nothing is copied.

    Raises:
        OSError: The file is gone.
    """
    with open(item.path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # writable, so that torch takes it as it is
    return {
        each.name: torch.frombuffer(
            memory, dtype=getattr(torch, each.dtype), count=prod(each.shape), offset=each.offset
        ).view(each.shape)
        if prod(each.shape)
        else torch.empty(each.shape, dtype=getattr(torch, each.dtype))
        for each in item.features
    }
