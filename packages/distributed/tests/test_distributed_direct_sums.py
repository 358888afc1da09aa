"""Small sums between GPUs of one host: who may read whose memory, and sums with the bits of all other collectives."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch

from quire_distributed import Collectives, run_thread_ranks
from quire_distributed.direct_sums import DirectSums, GpuRank, adds_in_rank_order, reason_against
from quire_distributed.exchange import sum_in_rank_order

HOST = [GpuRank(host=5, process=100 + rank, gpu=70 + rank) for rank in range(3)]
VISIBLE = {70: 2, 71: 0, 72: 1}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"gpu": 0}, "a rank computes on no NVIDIA GPU"),
        ({"host": 6}, "ranks are on several hosts"),
        ({"process": 100}, "ranks are threads of one process"),
        ({"gpu": 70}, "ranks share a GPU"),
        ({"gpu": 99}, r"the process of rank 0 does not see the GPU of rank 2 (CUDA_VISIBLE_DEVICES)"),
    ],
)
def test_who_reads_whose_memory(changed: dict[str, int], reason: str | None) -> None:
    ranks = [*HOST[:2], HOST[2]._replace(**changed)]
    assert reason_against(ranks, 0, VISIBLE, lambda own, other: True) == reason


def test_gpus_that_do_not_reach_each_other() -> None:
    """Asked for by the numbers that this process has for them."""
    asked = []

    def reaches(own: int, other: int) -> bool:
        asked.append((own, other))
        return other != 1

    reason = reason_against(HOST, 0, VISIBLE, reaches)
    assert reason == "the GPU of rank 0 cannot read the memory of that of rank 2"
    assert asked == [(2, 0), (2, 1)]


def sums_of(group: Collectives, step: int = 1) -> DirectSums:
    """As with torch's memory, but that what the others have is sent."""

    def add(part: torch.Tensor) -> torch.Tensor:
        parts = group.all_gather(part[None], dim=0)
        return sum_in_rank_order(list(parts)[::step])

    return DirectSums(torch.empty(5000), add)


def test_sums_have_the_bits_of_the_group() -> None:
    def run(group: Collectives) -> list[bool]:
        torch.manual_seed(group.rank)
        sums, same = sums_of(group), []
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.randn(7, 90, dtype=torch.float32).to(dtype).T
            assert sums.takes(x)
            got = sums.all_reduce(x)
            same.append(got.dtype == dtype and torch.equal(got, group.all_reduce(x)))
        kept = sums.all_reduce(torch.ones(3))
        sums.all_reduce(torch.zeros(3))
        return [*same, kept.tolist() == [3.0] * 3]

    assert run_thread_ranks(3, run) == [[True] * 4] * 3


def test_another_order_of_adding_is_found_out() -> None:
    def run(group: Collectives) -> list[bool]:
        cpu = torch.device("cpu")
        return [adds_in_rank_order(sums_of(group, step), group.rank, group.size, cpu) for step in (1, -1)]

    assert run_thread_ranks(3, run) == [[True, False]] * 3


def test_what_is_summed_otherwise() -> None:
    sums = DirectSums(torch.empty(8), torch.clone)
    assert sums.takes(torch.zeros(8))
    for other in (torch.zeros(9), torch.zeros(0), torch.zeros(4, dtype=torch.int32), torch.zeros(4, device="meta")):
        assert not sums.takes(other)


RANK = """
import logging, os, sys, torch
from quire_distributed import TorchRendezvous
from quire_distributed.direct_sums import open_direct_sums
logging.basicConfig(level=logging.INFO, format="%(message)s")
port, rank, device = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
group = TorchRendezvous("127.0.0.1", port, rank, 2).group("tp", range(2), custom_all_reduce=True)
on = torch.device(f"cuda:{rank}" if device == "cuda" else "cpu")
if device == "cpu":
    assert open_direct_sums(group, on, group._store, "x") is None
x = torch.randn(64, 256, generator=torch.Generator().manual_seed(rank)).bfloat16()
got = group.all_reduce(x.to(on))
if device == "cuda":
    assert group._direct_sums[on] is not None, "see the log"
    graph = torch.cuda.CUDAGraph()
    given = x.to(on)
    with torch.cuda.graph(graph):
        replayed = group.all_reduce(given)
    graph.replay()
    assert torch.equal(replayed, got)
parts = [torch.randn(64, 256, generator=torch.Generator().manual_seed(each)).bfloat16().float() for each in range(2)]
assert torch.equal(got.cpu(), (parts[0] + parts[1]).bfloat16())
group.barrier()
group.close()
print("done", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"))],
)
def test_two_processes(device: str) -> None:
    """On the CPU they are told that there are no GPUs, and sum as before."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(port), str(rank), device],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for rank, child in enumerate(children):
            out, log = child.communicate(timeout=300)
            assert out == "done\n", log
            if device == "cpu":
                assert f"rank {rank}: small sums between GPUs go through NCCL: a rank computes on no NVIDIA GPU" in log
    finally:
        for child in children:
            child.kill()
