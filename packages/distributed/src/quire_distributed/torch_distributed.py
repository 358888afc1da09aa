"""Ranks of several hosts or GPUs, by torch.distributed: gloo for tensors on the CPU, NCCL for those on GPUs.

On GPUs nothing waits on the host: collectives are put on the current stream, and their sizes follow from arguments
alone. So a step that has them can be captured in a CUDA graph, once each has run outside of one, which makes the
communicator (NCCL's user guide, "Using NCCL with CUDA Graphs"; `ProcessGroupNCCL.hpp` of torch, `asyncOp`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import distributed_c10d

from quire_distributed.collectives import Collectives, PendingTensor
from quire_distributed.direct_sums import DirectSums, open_direct_sums
from quire_distributed.exchange import ExchangeCollectives, as_bytes, resolve_dim, sum_in_rank_order
from quire_distributed.liveness import Liveness, bind_datagrams
from quire_distributed.single import SingleRank
from quire_interfaces import ConfigError, RankDeadError
from quire_interfaces.platforms import platform_of_type

__all__ = ["TorchCollectives", "TorchRendezvous"]

_dist: Any = distributed  # its process groups have no complete types
_c10d: Any = distributed_c10d
_FOREVER = timedelta(days=365)
"""How long torch may wait: idle ranks wait for requests, and who is gone is `Liveness`'s to say."""
_EXCHANGES, _MESSAGES, _ENDS = 1, 2, 3
"""Tags of gloo's messages: of collectives, between two ranks, and of none, which is how waiting is ended."""
_LARGE_BYTES = 1 << 16
"""A sum of at least so many bytes is cut: each rank sums a slice, then all gather them."""
_SUMMED_BY_NCCL = (torch.uint8, torch.int8, torch.int32, torch.int64)
"""Whole numbers have the same sum in any order."""


class TorchRendezvous:
    """Where ranks of several hosts find each other: a store at one address, served by rank 0.

    Args:
        master_addr: Name or address of rank 0's host, as all hosts reach it.
        master_port: A port of that host that is free; 0, for rank 0, takes one (`port`), which the others are told.
        rank: Number of this rank among all.
        world_size: Number of ranks of all hosts.
        timeout_s: How long to wait for the others.

    Raises:
        ConfigError: The store cannot be opened, or the others did not come in time.
    """

    def __init__(
        self, master_addr: str, master_port: int, rank: int, world_size: int, *, timeout_s: float = 300.0
    ) -> None:
        self._rank = rank
        self._address = (master_addr, master_port)
        timeout = timedelta(seconds=timeout_s)
        try:
            self._store = _dist.TCPStore(
                master_addr, master_port, world_size, rank == 0, timeout, wait_for_workers=master_port != 0
            )
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"rank {rank} of {world_size} cannot meet the others at {master_addr}:{master_port}: {error}",
                field="master_addr",
            ) from error
        self.port: int = self._store.port
        """The port of the store."""
        self._host = _own_address(master_addr, self.port)

    def group(
        self, name: str, ranks: Sequence[int], *, silence_s: float = 10.0, custom_all_reduce: bool = False
    ) -> Collectives:
        """Collectives of some of the ranks, `SingleRank` of one. Each of them calls this, with the same name and ranks.

        Args:
            name: A name that no other group has.
            ranks: Their numbers among all, in the order of their numbers in the group: what `Mesh.group` gives.
            silence_s: How long nothing may be heard of a rank before it counts as gone. One whose process ended is
                noticed sooner.
            custom_all_reduce: See `TorchCollectives`; the same on all ranks.

        Raises:
            ConfigError: The others did not come in time.
            ValueError: This rank is none of `ranks`.
        """
        if self._rank not in ranks:
            raise ValueError(f"rank {self._rank} is none of the group's, which are {list(ranks)}")
        if len(ranks) == 1:
            return SingleRank()
        store = _dist.PrefixStore(name, self._store)
        try:
            return TorchCollectives(
                store, ranks.index(self._rank), len(ranks), host=self._host, silence_s=silence_s,
                custom_all_reduce=custom_all_reduce,
            )  # fmt: skip
        except RuntimeError as error:
            raise ConfigError(f"ranks {list(ranks)} cannot form the group {name!r}: {error}") from error


class TorchCollectives(ExchangeCollectives):
    """Collectives of one rank of a group, by the devices of its tensors; `TorchRendezvous.group` makes it.

    One thread at a time, but for `abort` and `close`.

    Args:
        store: A store of the group's own, with a timeout for the others to come.
        rank: Number of this rank.
        size: Number of ranks, at least 2.
        host: Address of this host that the others reach.
        silence_s: How long nothing may be heard of a rank before it counts as gone.
        custom_all_reduce: Whether GPUs of one host read small sums from each other's memory where they can
            (`direct_sums`), in the place of NCCL. A kernel waits for a rank that is gone without end, then.

    Raises:
        RuntimeError: The others did not come in time.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        *,
        host: str,
        silence_s: float = 10.0,
        custom_all_reduce: bool = False,
    ) -> None:
        super().__init__(rank, size)
        self._custom_all_reduce = custom_all_reduce
        self._direct_sums: dict[torch.device, DirectSums | None] = {}
        self._store, self._host, self._silence_s = store, host, silence_s
        options = _dist.ProcessGroupGloo._Options()
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = store.timeout
        self._gloo: Any = _dist.ProcessGroupGloo(_dist.PrefixStore("gloo", store), rank, size, options)
        self._gloo._set_default_timeout(_FOREVER)
        self._nccl: Any = None
        self._has_met = False
        """All ranks have come to their first collective of NCCL."""
        self._liveness = self._watch(host, silence_s)

    def subgroup(self, members: Sequence[int]) -> Collectives:
        """The group of some of these ranks, this one among them; each of them calls this. `SingleRank` of one.

        Raises:
            RuntimeError: The others did not come in time.
        """
        if len(members) == 1:
            return SingleRank()
        store = _dist.PrefixStore("of " + " ".join(map(str, members)), self._store)
        own = list(members).index(self._rank)
        return TorchCollectives(
            store, own, len(members), host=self._host, silence_s=self._silence_s,
            custom_all_reduce=self._custom_all_reduce,
        )  # fmt: skip

    def _watch(self, host: str, silence_s: float) -> Liveness:
        peers = [peer for peer in range(self._size) if peer != self._rank]
        sockets = {peer: bind_datagrams(host) for peer in peers}
        for peer, bound in sockets.items():
            self._store.set(f"datagrams/{self._rank}/{peer}", json.dumps(bound.getsockname()[:2]))
        if self._rank == 0:
            self._store.set("token", uuid.uuid4().hex)
        token = self._store.get("token").decode()
        liveness = Liveness(self._rank, sockets, token, silence_s, self._end_waiting)
        addresses = {peer: json.loads(self._store.get(f"datagrams/{peer}/{self._rank}")) for peer in peers}
        liveness.start({peer: (host, port) for peer, (host, port) in addresses.items()})
        return liveness

    def _end_waiting(self) -> None:
        """Make what waits for other ranks raise: a message that is late spoils all connections of gloo. One from a rank
        whose connection has ended is refused at once and spoils none, so that all of them are asked."""
        for peer in range(self._size):
            if peer != self._rank:
                with contextlib.suppress(RuntimeError):
                    late = torch.empty(1, dtype=torch.uint8)
                    self._gloo.recv([late], peer, _ENDS).wait(timedelta(milliseconds=1))
        if self._nccl is not None:
            self._nccl.abort()

    def _exchange(self, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        self._liveness.check()
        by_nccl = _sends_with_nccl(sent[0])
        return self._exchange_by_nccl(sent, shapes) if by_nccl else self._exchange_by_gloo(sent, shapes)

    def _exchange_by_gloo(self, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        received = [sent[0].new_empty(tuple(shape)) for shape in shapes]
        received[self._rank] = sent[self._rank]
        peers = [(self._rank + i) % self._size for i in range(1, self._size)]
        works = [(peer, self._begin(self._gloo.recv, received[peer], peer, _EXCHANGES)) for peer in peers]
        works += [(peer, self._begin(self._gloo.send, sent[peer], peer, _EXCHANGES)) for peer in peers]
        for peer, work in works:
            self._wait(work, peer)
        return received

    def _exchange_by_nccl(self, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        numbers = [prod(shape) for shape in shapes]
        joined = torch.cat([as_bytes(each) for each in sent])
        out = sent[0].new_empty(sum(numbers))
        width = out.itemsize
        self._all_to_all(out, joined, [number * width for number in numbers], [each.numel() * width for each in sent])
        return [part.view(tuple(shape)) for part, shape in zip(out.split(numbers), shapes, strict=True)]

    def _all_to_all(self, out: Tensor, sent: Tensor, recv_bytes: Sequence[int], send_bytes: Sequence[int]) -> None:
        """Fill `out` with what the ranks have for this one; both contiguous, in parts of so many bytes."""
        if out.numel() or sent.numel():
            options = _on_current_stream(_c10d.AllToAllOptions())
            call = self._nccl_collectives().alltoall_base
            self._run(lambda: call(as_bytes(out), as_bytes(sent), recv_bytes, send_bytes, options))

    def all_gather(self, x: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        if not _sends_with_nccl(x):
            return super().all_gather(x, dim, sizes)
        self._liveness.check()
        dim = resolve_dim(x, dim)
        lengths = self._gather_sizes(x, dim, sizes)
        longest = max(lengths)
        own = x.contiguous()
        if x.shape[dim] < longest:  # NCCL gathers parts of one size
            own = x.new_empty((*x.shape[:dim], longest, *x.shape[dim + 1 :]))
            own.narrow(dim, 0, x.shape[dim]).copy_(x)
        parts = x.new_empty((self._size, *own.shape))
        if own.numel():
            options, call = _on_current_stream(_c10d.AllgatherOptions()), self._nccl_collectives()._allgather_base
            self._run(lambda: call(as_bytes(parts), as_bytes(own), options))
        if min(lengths) == longest:
            return parts.movedim(0, dim).flatten(dim, dim + 1).contiguous()
        return torch.cat([part.narrow(dim, 0, each) for part, each in zip(parts, lengths, strict=True)], dim)

    def all_to_all(self, x: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Tensor:
        if not _sends_with_nccl(x):
            return super().all_to_all(x, send_sizes, recv_sizes)
        self._liveness.check()
        send_sizes, recv_sizes = self._all_to_all_sizes(x, send_sizes, recv_sizes)
        sent, out = x.contiguous(), x.new_empty((sum(recv_sizes), *x.shape[1:]))
        row_bytes = prod(x.shape[1:]) * x.itemsize
        recv_bytes, send_bytes = ([size * row_bytes for size in sizes] for sizes in (recv_sizes, send_sizes))
        self._all_to_all(out, sent, recv_bytes, send_bytes)
        return out

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._custom_all_reduce and x.device.type == "cuda":
            direct = self._direct_sums_of(x.device)
            if direct is not None and direct.takes(x):
                self._liveness.check()
                return direct.all_reduce(x)
        if _sends_with_nccl(x) and x.dtype in _SUMMED_BY_NCCL:
            self._liveness.check()
            out = x.clone(memory_format=torch.contiguous_format)
            if out.numel():
                options, call = _on_current_stream(_c10d.AllreduceOptions()), self._nccl_collectives().allreduce
                self._run(lambda: call([out], options))
            return out
        if x.numel() * x.itemsize < _LARGE_BYTES:
            if _sends_with_nccl(x):
                return sum_in_rank_order(self.all_gather(x[None], 0).unbind())
            return super().all_reduce(x)
        flat = x.contiguous().view(-1)
        least, more = divmod(x.numel(), self._size)
        sizes = [least + (rank < more) for rank in range(self._size)]
        return self.all_gather(self.reduce_scatter(flat, 0, sizes), 0, sizes).view(x.shape)

    def _direct_sums_of(self, device: torch.device) -> DirectSums | None:
        """None where NCCL serves, as for sums that are captured before one was not."""
        if device not in self._direct_sums:  # every rank comes here with its first sum on a GPU
            if torch.cuda.is_current_stream_capturing():
                return None
            token = self._store.get("token").decode()
            store = _dist.PrefixStore("direct sums", self._store)
            self._direct_sums[device] = open_direct_sums(self, device, store, f"quire {token}")
        return self._direct_sums[device]

    def isend(self, x: Tensor, to: int) -> PendingTensor:
        self._check_peer(to)
        self._liveness.check()
        data = x.contiguous()
        return _WorkTensor(self, self._send(data, to), x, to, data)

    def irecv(self, like: Tensor, from_: int) -> PendingTensor:
        self._check_peer(from_)
        self._liveness.check()
        out = torch.empty_like(like, memory_format=torch.contiguous_format)
        return _WorkTensor(self, self._receive(out, from_), out, from_, out)

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1, dtype=torch.uint8))

    def check(self) -> None:
        self._liveness.check()

    def abort(self, cause: str) -> None:
        self._liveness.report(self._rank, cause)

    def close(self) -> None:
        self._liveness.close()

    def _send(self, x: Tensor, to: int) -> Any:
        group = self._nccl_group() if _sends_with_nccl(x) else self._gloo
        return self._begin(group.send, x, to, _MESSAGES)

    def _receive(self, out: Tensor, from_: int) -> Any:
        group = self._nccl_group() if _sends_with_nccl(out) else self._gloo
        return self._begin(group.recv, out, from_, _MESSAGES)

    def _begin(self, call: Any, x: Tensor, peer: int, tag: int) -> Any:
        """Begin to send or to receive the bytes of a contiguous tensor; None where there are none."""
        if x.numel() == 0:
            return None
        return self._begun(partial(call, [as_bytes(x)], peer, tag), peer)

    def _run(self, call: Callable[[], Any]) -> None:
        """Begin a collective of NCCL on the current stream, which waits for it; this thread does not."""
        self._wait(self._begun(call, self._first_peer), self._first_peer)

    @property
    def _first_peer(self) -> int:
        return int(self._rank == 0)

    def _begun(self, call: Callable[[], Any], peer: int) -> Any:
        try:
            return call()
        except RuntimeError as error:
            raise self._failure(peer, error) from error

    def _wait(self, work: Any, peer: int) -> None:
        if work is None:
            return
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failure(peer, error) from error

    def _failure(self, peer: int, error: RuntimeError) -> RankDeadError:
        return self._liveness.failure_of(peer, f"the connection to it broke: {str(error).splitlines()[0]}")

    def _nccl_collectives(self) -> Any:
        """NCCL's group, for what all ranks do. The first time they make a communicator, in which nothing would wake a
        rank that waits for one that is gone: so they meet before."""
        if not self._has_met:
            zero = torch.zeros(1, dtype=torch.uint8)
            self._exchange_by_gloo([zero] * self._size, [[1]] * self._size)
            self._has_met = True
        return self._nccl_group()

    def _nccl_group(self) -> Any:
        if self._nccl is None:  # every rank comes here with its first tensor on a GPU
            # Its watchdog would end the process when a rank is gone, and nobody would hear which: `Liveness` says it.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            options = _dist.ProcessGroupNCCL.Options()
            options._timeout = _FOREVER
            self._nccl = _dist.ProcessGroupNCCL(_dist.PrefixStore("nccl", self._store), self._rank, self._size, options)
        return self._nccl


def _sends_with_nccl(x: Tensor) -> bool:
    return platform_of_type(x.device.type).distributed_backend == "nccl"


def _on_current_stream(options: Any) -> Any:
    """Options of a collective that runs on the current stream, instead of one beside it that both wait for."""
    options.asyncOp = False
    return options


class _WorkTensor:
    """A `PendingTensor` that torch sends or receives."""

    __slots__ = ("_data", "_group", "_peer", "_tensor", "_work")

    def __init__(self, group: TorchCollectives, work: Any, tensor: Tensor, peer: int, data: Tensor) -> None:
        self._group = group
        self._work = work
        self._tensor = tensor
        self._peer = peer
        self._data: Tensor | None = data  # torch sends from it

    def wait(self) -> Tensor:
        if self._data is not None:
            self._group._wait(self._work, self._peer)
            self._data = None
        return self._tensor


def _own_address(host: str, port: int) -> str:
    """Address of this host that faces another one."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as facing:
        facing.connect(address)
        own: str = facing.getsockname()[0]
        return own
