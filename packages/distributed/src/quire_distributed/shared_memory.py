"""Ranks that are processes of one host and meet in shared memory (`csrc/shared_group.h` of kernels-cpu).

The memory has no name in any folder, so that nothing remains of it whatever ends the ranks. Knows CPU tensors.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from math import prod
from typing import Any

import torch
from torch import Tensor

from quire_distributed.collectives import PendingTensor
from quire_distributed.exchange import ArrivedTensor, ExchangeCollectives, ReceivingTensor, as_bytes, resolve_dim
from quire_interfaces import ConfigError, RankDeadError
from quire_interfaces.plugins import installed_plugins

__all__ = ["SharedMemoryCollectives", "SharedMemoryRendezvous"]

_NUMBERS = {
    torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3, torch.bool: 4, torch.uint8: 5,
    torch.int8: 5, torch.int16: 6, torch.int32: 7, torch.int64: 8,
}  # fmt: skip
"""Dtypes that are summed by the library -> its number for them (`quire_group_all_reduce`)."""
_DONE, _RANK_GONE, _OTHER_SIZES = range(3)
_WAIT_MS = 100
"""Longest sleep before a rank looks whether the others still live."""


def _library() -> Any:
    """C functions of the first installed kernel package that has a module `shared_group`.

    Kernel packages are those with an entry point in the group `quire.ops`.

    Raises:
        ConfigError: There is none, or it was not compiled.
    """
    for plugin in installed_plugins("quire.ops").values():
        name = f"{plugin.point.module.partition('.')[0]}.shared_group"
        if find_spec(name) is not None:
            return import_module(name).kernels()
    raise ConfigError("collectives in shared memory need a kernel package: install quire-kernels-cpu")


class SharedMemoryRendezvous:
    """The memory of a new group, for whoever starts its ranks; a context manager.

    Open it until all ranks have joined. The memory lives as long as a rank does.

    Args:
        size: Number of ranks, 64 at most.
        slice_bytes: What a rank brings to one meeting; larger tensors go in pieces. A multiple of 64. Each rank uses
            twice as much memory.
        channel_bytes: What one rank may send to another before that receives it, without help of a thread. A power of
            two. Memory is used as far as it was filled once.

    Raises:
        ConfigError: There is no kernel package for this machine, or the memory cannot be had.
        ValueError: A number is out of its bounds.
    """

    def __init__(self, size: int, *, slice_bytes: int = 1 << 20, channel_bytes: int = 1 << 24) -> None:
        library = _library()
        self._fd = os.memfd_create("quire-group", os.MFD_CLOEXEC)
        error = library.quire_group_create(self._fd, size, slice_bytes, channel_bytes)
        if error:
            self.close()
            numbers = f"size {size}, slice_bytes {slice_bytes}, channel_bytes {channel_bytes}"
            raise ValueError(f"a group in shared memory cannot be made of {numbers}: {os.strerror(error)}")

    @property
    def address(self) -> str:
        """Where the ranks find the memory: a path that processes of the same user can open while this is open."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def fd(self) -> int:
        """File descriptor of the memory; a child that inherits it finds the memory at /proc/self/fd/N."""
        return self._fd

    def close(self) -> None:
        """Close the descriptor; ranks that have joined keep the memory."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> SharedMemoryRendezvous:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SharedMemoryCollectives(ExchangeCollectives):
    """Collectives of one rank of a group of processes of one host, for tensors on the CPU.

    Returns once all ranks have joined. One thread at a time, but for `abort` and `close`.

    Args:
        address: `SharedMemoryRendezvous.address`.
        rank: Number of this rank.
        size: Number of ranks.
        timeout_s: How long to wait for the other ranks to join.
        spin_us: How long a wait reads memory again and again before it sleeps, which costs a core meanwhile and saves
            what waking costs, some 50 us; None for 100 where there is a core for every rank, else 0.

    Raises:
        RankDeadError: A rank ended, or did not join in time.
        ConfigError: There is no kernel package for this machine, or `address` is not that of a group of `size` ranks.
    """

    def __init__(
        self, address: str, rank: int, size: int, *, timeout_s: float = 60.0, spin_us: int | None = None
    ) -> None:
        super().__init__(rank, size)
        if spin_us is None:
            spin_us = 100 if len(os.sched_getaffinity(0)) >= size else 0
        self._library = _library()
        self._handle = _join(self._library, address, rank, size, spin_us)
        self._all_reduce = self._library.quire_group_all_reduce
        self._all_gather = self._library.quire_group_all_gather
        self._widths = ctypes.c_int64 * size
        self._senders: dict[int, _Sender] = {}
        self._receiving: list[deque[ReceivingTensor]] = [deque() for _ in range(size)]
        if not self._library.quire_group_wait_for_all(self._handle, int(timeout_s * 1000)):
            self._raise_failure()

    def __del__(self) -> None:
        if (handle := getattr(self, "_handle", None)) is not None:
            self.close()
            self._library.quire_group_delete(handle)

    @property
    def handle(self) -> int:
        """Address of the `SharedGroup` in this process, for kernels that meet inside one call.

        Lives as long as this object. Of that and of these methods one at a time may be used.
        """
        return self._handle

    def check(self) -> None:
        """Raise what a kernel that used `handle` met.

        Raises:
            RankDeadError: A rank is gone.
        """
        if self._library.quire_group_failed_rank(self._handle) >= 0:
            self._raise_failure()

    def all_gather(self, x: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        dim = resolve_dim(x, dim)
        lengths = self._gather_sizes(x, dim, sizes)
        shape = list(x.shape)
        rows, width = prod(shape[:dim]), prod(shape[dim + 1 :]) * x.itemsize
        shape[dim] = sum(lengths)
        return self._gather(x, x.new_empty(shape), rows, [length * width for length in lengths])

    def _gather(self, x: Tensor, out: Tensor, rows: int, widths: Sequence[int]) -> Tensor:
        """`out`, filled with the ranks' tensors of `rows` rows of `widths` bytes side by side."""
        x = self._on_cpu(x)
        self._check(self._all_gather(self._handle, x.data_ptr(), out.data_ptr(), rows, self._widths(*widths)))
        return out

    def all_reduce(self, x: Tensor) -> Tensor:
        number = _NUMBERS.get(x.dtype)
        if number is None:
            return super().all_reduce(x)
        x = self._on_cpu(x)
        out = torch.empty_like(x)
        self._check(self._all_reduce(self._handle, number, x.data_ptr(), out.data_ptr(), x.numel()))
        return out

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        self._check_rank(root)
        widths = [0] * self._size
        widths[root] = x.numel() * x.itemsize
        return self._gather(x, x.new_empty(x.shape), 1, widths)

    def _exchange(self, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        joined = self._on_cpu(torch.cat([as_bytes(x) for x in sent]))
        offset = [0]
        for x in sent:
            offset.append(offset[-1] + x.numel() * x.itemsize)
        numbers = [prod(shape) for shape in shapes]
        out = sent[0].new_empty(sum(numbers))
        sizes = self._widths(*(number * out.itemsize for number in numbers))
        offsets = (ctypes.c_int64 * len(offset))(*offset)
        call = self._library.quire_group_all_to_all
        self._check(call(self._handle, joined.data_ptr(), offsets, out.data_ptr(), sizes))
        return [part.view(*shape) for part, shape in zip(out.split(numbers), shapes, strict=True)]

    def isend(self, x: Tensor, to: int) -> PendingTensor:
        self._check_peer(to)
        self.check()
        if to not in self._senders:
            self._senders[to] = _Sender(to)
        return self._senders[to].send(self, x, self._on_cpu(x))

    def irecv(self, like: Tensor, from_: int) -> PendingTensor:
        self._check_peer(from_)
        return ReceivingTensor(self._receiving[from_], lambda: self._receive(like, from_))

    def _receive(self, like: Tensor, from_: int) -> Tensor:
        out = torch.empty_like(self._on_cpu(like), memory_format=torch.contiguous_format)
        at, left = out.data_ptr(), out.numel() * out.itemsize
        while left:
            num = self._library.quire_group_receive_some(self._handle, from_, at, left)
            at, left = at + num, left - num
            if left:
                self._wait_for_channel(from_, receives=True)
        return out

    def _wait_for_channel(self, peer: int, *, receives: bool) -> None:
        if not self._library.quire_group_wait_for_channel(self._handle, peer, receives, _WAIT_MS):
            self._raise_failure()

    def send_all(self, to: int, data: Tensor, num_sent: int) -> None:
        """Send the bytes of a contiguous tensor but for the first `num_sent`, and wait until all are in the channel."""
        at, left = data.data_ptr() + num_sent, data.numel() * data.itemsize - num_sent
        while left:
            num = self.send_some(to, at, left)
            at, left = at + num, left - num
            if left:
                self._wait_for_channel(to, receives=False)

    def send_some(self, to: int, data: int, num_bytes: int) -> int:
        """Number of the bytes at `data` that the channel to a rank had place for."""
        num: int = self._library.quire_group_send_some(self._handle, to, data, num_bytes)
        return num

    def barrier(self) -> None:
        self._check(self._library.quire_group_barrier(self._handle))

    def abort(self, cause: str) -> None:
        self._library.quire_group_fail(self._handle, self._rank, cause.encode()[:500])

    def close(self) -> None:
        self.abort("it left the group")

    def _on_cpu(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            raise ValueError(f"a tensor on {x.device} cannot go through shared memory; it must be on the CPU")
        return x.contiguous()

    def _check(self, result: int) -> None:
        if result == _RANK_GONE:
            self._raise_failure()
        if result == _OTHER_SIZES:
            raise ValueError(f"rank {self._rank} expects other sizes than another rank has")

    def _raise_failure(self) -> None:
        cause = ctypes.string_at(self._library.quire_group_cause(self._handle)).decode(errors="replace")
        raise RankDeadError(self._library.quire_group_failed_rank(self._handle), cause)


def _join(library: Any, address: str, rank: int, size: int, spin_us: int) -> int:
    handle = ctypes.c_void_p()
    try:
        fd = os.open(address, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"the group's memory at {address} cannot be opened: {error.strerror}") from error
    try:
        error_number = library.quire_group_join(fd, rank, size, spin_us * 1000, ctypes.byref(handle))
    finally:
        os.close(fd)
    if error_number or handle.value is None:
        raise ConfigError(f"{address} is no group of {size} ranks that can be joined: {os.strerror(error_number)}")
    return handle.value


class _SendingTensor:
    """A `PendingTensor` that finds no place in its channel yet."""

    __slots__ = ("_sent", "_tensor", "data", "failure")

    def __init__(self, tensor: Tensor, data: Tensor) -> None:
        self._tensor = tensor
        self.data = data
        """What is sent: the tensor, or a contiguous copy."""
        self.failure: RankDeadError | None = None
        self._sent = threading.Event()

    def finish(self) -> None:
        """Wake whoever waits."""
        self._sent.set()

    def wait(self) -> Tensor:
        self._sent.wait()
        if self.failure is not None:
            raise RankDeadError(self.failure.rank, self.failure.cause)
        return self._tensor


class _Sender:
    """Tensors on their way to one rank, in order. While one finds no place in the channel, a thread sends."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._waiting: deque[_SendingTensor] = deque()
        self._lock = threading.Lock()

    def send(self, group: SharedMemoryCollectives, x: Tensor, data: Tensor) -> PendingTensor:
        """Send the bytes of `data`, which is `x` or a contiguous copy of it."""
        num_bytes = data.numel() * data.itemsize
        with self._lock:
            num_sent = 0 if self._waiting else group.send_some(self._to, data.data_ptr(), num_bytes)
            if num_sent == num_bytes:
                return ArrivedTensor(x)
            sending = _SendingTensor(x, data)
            self._waiting.append(sending)
            if len(self._waiting) == 1:
                threading.Thread(target=self._drain, args=(group, num_sent), name="sender", daemon=True).start()
        return sending

    def _drain(self, group: SharedMemoryCollectives, num_sent: int) -> None:
        """Send what waits, the first `num_sent` bytes of which are sent."""
        failure: RankDeadError | None = None
        while True:
            sending = self._waiting[0]
            try:
                if failure is None:
                    group.send_all(self._to, sending.data, num_sent)
            except RankDeadError as error:
                failure = error
            num_sent = 0
            sending.failure = failure
            with self._lock:
                self._waiting.popleft()
                sending.finish()
                if not self._waiting:
                    return
