"""Weights on their way from mapped files to a device: read into pinned memory while what was read before is copied.

A copy from a mapped file waits for the disk, then for the device, one after the other, and goes through a buffer of
the driver's. Here two pinned buffers take turns: the host fills one while the device's copy engine empties the other
on a stream of its own. Conversions to another dtype are made on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire_interfaces.platforms import platform_of_type

__all__ = ["StagedUploads"]

BUFFER_BYTES = 64 << 20
NUM_BUFFERS = 2


class StagedUploads:
    """Copies tensors of the host to one device. Where the device has no streams, each copy is made at once, in the same
    pieces."""

    def __init__(self, device: torch.device, buffer_bytes: int = BUFFER_BYTES) -> None:
        """Args:
        buffer_bytes: Of each of two buffers in pinned memory; a multiple of 16.
        """
        self._device = device
        platform = platform_of_type(device.type)
        pins = platform.pins_memory
        self._buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=pins) for _ in range(NUM_BUFFERS)]
        self._emptied: list[Any] = [None] * NUM_BUFFERS
        self._next = 0
        self._runtime: Any = platform.runtime() if platform.module else None
        self._stream: Any = None if self._runtime is None else self._runtime.Stream(device)

    def upload(self, tensor: Tensor, dtype: torch.dtype, memory: Tensor | None = None) -> Tensor:
        """Begin to copy a tensor of the host, which may be changed or unmapped as soon as this returns.

        Args:
            tensor: Any shape and strides.
            dtype: Of the result.
            memory: Of this shape and dtype on the device, contiguous, for the result; None for memory of its own.

        Returns:
            The tensor on the device, contiguous: `memory`, if that is given. It is complete after `finish`.
        """
        source = tensor.detach().contiguous()
        # Memory of the stream that the network runs on, whose work may still use what it has just given back.
        result = torch.empty(source.shape, dtype=dtype, device=self._device) if memory is None else memory
        is_exact = dtype == source.dtype
        copied = result if is_exact else torch.empty(source.shape, dtype=source.dtype, device=self._device)
        if self._runtime is None:
            self._copy(source, copied)
            return result if is_exact else result.copy_(copied)
        self._stream.wait_stream(self._runtime.current_stream(self._device))
        with self._runtime.stream(self._stream):
            self._copy(source, copied)
            if result is not copied:
                result.copy_(copied)
                copied.record_stream(self._stream)
        return result

    def finish(self) -> None:
        """Let what is launched from now on find everything complete. Gives the buffers up; nothing may follow."""
        if self._runtime is not None:
            self._runtime.current_stream(self._device).wait_stream(self._stream)
            self._stream.synchronize()  # the buffers are read until then
        self._buffers.clear()

    def _copy(self, source: Tensor, target: Tensor) -> None:
        """By pieces of a buffer's size."""
        if not source.numel():
            return
        from_bytes, to_bytes = (each.reshape(-1).view(torch.uint8) for each in (source, target))
        size = len(self._buffers[0])
        for begin in range(0, len(from_bytes), size):
            piece = from_bytes[begin : begin + size]
            staged = self._filled(piece)
            to_bytes[begin : begin + size].copy_(staged, non_blocking=True)
            if self._stream is not None:
                self._emptied[self._next] = self._stream.record_event()
            self._next = (self._next + 1) % NUM_BUFFERS

    def _filled(self, piece: Tensor) -> Tensor:
        """The piece in the next buffer, once that is empty."""
        emptied = self._emptied[self._next]
        if emptied is not None:
            emptied.synchronize()
        return self._buffers[self._next][: len(piece)].copy_(piece)
