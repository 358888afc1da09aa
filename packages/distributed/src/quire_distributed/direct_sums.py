"""Sums of small tensors of the GPUs of one host: every rank reads all ranks' numbers from their memory, in one launch.

torch's symmetric memory (`torch.distributed._symmetric_memory`, one-shot all-reduce) in the place of NCCL's exchange,
which takes several launches. Numbers are handed over in float32, so that the sum is what `Collectives.all_reduce` says,
to the bit; what torch computes is held against that when the group opens it. No multicast (NVLink SHARP): a switch adds
in an order of its own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire_distributed.collectives import Collectives
from quire_distributed.exchange import sum_in_rank_order

__all__ = ["MAX_BYTES", "DirectSums", "GpuRank", "adds_in_rank_order", "open_direct_sums", "reason_against"]

MAX_BYTES = 1 << 20
"""Largest sum in float32: a rank reads as much from each other one. 64 rows of a hidden size of 4,096."""
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_PROBED = 4096
_logger = logging.getLogger(__name__)


class GpuRank(NamedTuple):
    """What the others must know of a rank."""

    host: int
    """Tells hosts apart, and containers of one."""
    process: int
    gpu: int
    """Tells GPUs apart, whatever number a process has for them; 0 for none."""


class DirectSums:
    """Sums of one rank of a group.

    Args:
        buffer: float32, one-dimensional, memory that all ranks read: what is summed is put there. It is made once, so
            that graphs may capture a sum.
        add: The first numbers of the buffer -> their sum over the ranks, in memory of its own.
    """

    def __init__(self, buffer: Tensor, add: Callable[[Tensor], Tensor]) -> None:
        self._buffer, self._add = buffer, add

    def takes(self, x: Tensor) -> bool:
        """Whether a tensor is summed here: it is small, and of floating point."""
        return x.dtype in _DTYPES and x.device == self._buffer.device and 0 < x.numel() <= self._buffer.numel()

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collectives`. A rank that is gone is waited for without end: a kernel cannot be told."""
        part = self._buffer[: x.numel()]
        part.view(x.shape).copy_(x)
        return self._add(part).view(x.shape).to(x.dtype)


def open_direct_sums(
    group: Collectives, device: torch.device, store: Any, name: str, *, max_bytes: int = MAX_BYTES
) -> DirectSums | None:
    """Sums between the GPUs of a group; None where they cannot be, for a reason that is logged. All ranks call this,
    and get the same.

    Args:
        group: Of all ranks; tensors on the CPU are sent through it.
        device: Of this rank's tensors.
        store: A store of torch that the ranks of this group have for this alone.
        name: A name that no other group of these processes has, the same on all ranks.
    """
    own = _rank_here(device)
    numbers = group.all_gather(torch.tensor([own], dtype=torch.int64), dim=0)
    ranks = [GpuRank(*row) for row in numbers.tolist()]
    reason = reason_against(ranks, group.rank, _visible_gpus(), torch.cuda.can_device_access_peer)
    if not _all_agree(group, reason):
        return None
    made: list[DirectSums] = []

    def allocate() -> None:
        memory.append(_symmetric_memory().empty(max_bytes // 4, dtype=torch.float32, device=device))

    def meet() -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        _SymmetricMemory.set_group_info(name, group.rank, group.size, store)
        _symmetric_memory().rendezvous(memory[0], name)
        made.append(DirectSums(memory[0], lambda part: torch.ops.symm_mem.one_shot_all_reduce(part, "sum", name)))

    def probe() -> None:
        if not adds_in_rank_order(made[0], group.rank, group.size, device):
            raise RuntimeError("torch adds in another order than that of the ranks")

    memory: list[Tensor] = []
    for step in (allocate, meet, probe):  # each is begun where all ranks have ended the one before
        failure = None
        try:
            step()
        except Exception as error:  # private functions of torch, which differ between versions
            failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if not _all_agree(group, failure):
            return None
    return made[0]


def reason_against(
    ranks: Sequence[GpuRank], rank: int, visible: Mapping[int, int], reaches: Callable[[int, int], bool]
) -> str | None:
    """Why the GPUs of a group cannot read each other's memory, as far as one rank sees it, or None.

    Args:
        ranks: All of the group.
        rank: The one that asks.
        visible: GPUs that its process sees -> their numbers there.
        reaches: Whether one of these reads the memory of another one.
    """
    own = ranks[rank]
    if any(each.gpu == 0 for each in ranks):
        return "a rank computes on no NVIDIA GPU"
    if any(each.host != own.host for each in ranks):
        return "ranks are on several hosts"
    if len({each.process for each in ranks}) < len(ranks):
        return "ranks are threads of one process"
    if len({each.gpu for each in ranks}) < len(ranks):
        return "ranks share a GPU"
    for number, each in enumerate(ranks):
        if each.gpu not in visible:
            return f"the process of rank {rank} does not see the GPU of rank {number} (CUDA_VISIBLE_DEVICES)"
        if number != rank and not reaches(visible[own.gpu], visible[each.gpu]):
            return f"the GPU of rank {rank} cannot read the memory of that of rank {number}"
    return None


def adds_in_rank_order(sums: DirectSums, rank: int, size: int, device: torch.device) -> bool:
    """Whether sums of the ranks' random numbers have the bits that their order gives them. All ranks call this."""
    parts = [torch.randn(_PROBED, generator=torch.Generator().manual_seed(each)) for each in range(size)]
    got = sums.all_reduce(parts[rank].to(device)).cpu()
    return torch.equal(got, sum_in_rank_order(parts))


def _all_agree(group: Collectives, reason: str | None) -> bool:
    """Whether no rank has a reason against it; every rank that has one logs it."""
    if reason is not None:
        _logger.info("rank %d: small sums between GPUs go through NCCL: %s", group.rank, reason)
    return not bool(group.all_reduce(torch.tensor([reason is not None])))


def _rank_here(device: torch.device) -> GpuRank:
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = _number(f"{boot.read_text() if boot.exists() else ''} {socket.gethostname()}")
    gpu = _number(str(torch.cuda.get_device_properties(device).uuid)) if _is_nvidia(device) else 0
    return GpuRank(host, os.getpid(), gpu)


def _visible_gpus() -> dict[int, int]:
    numbers = range(torch.cuda.device_count() if torch.version.hip is None else 0)
    return {_number(str(torch.cuda.get_device_properties(number).uuid)): number for number in numbers}


def _is_nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


def _number(text: str) -> int:
    """63 bits that tell texts apart."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _symmetric_memory() -> Any:
    from torch.distributed import _symmetric_memory

    return _symmetric_memory
