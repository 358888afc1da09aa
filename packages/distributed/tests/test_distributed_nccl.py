"""Collectives of tensors on GPUs, by NCCL, against plain torch: every rank is a thread with a GPU of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from quire_distributed import Collectives, TorchCollectives

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def run(group: list[Collectives], dtype: torch.dtype) -> None:
    parts = [torch.randn(3, 40_000).to(dtype) for _ in group]
    sizes = [7, 0]

    def collect(each: Collectives) -> list[torch.Tensor]:
        own = parts[each.rank].to(f"cuda:{each.rank}")
        results = [
            each.all_reduce(own),
            each.all_gather(own, 0),
            each.all_gather(own[:, : sizes[each.rank]], -1, sizes),
        ]
        results += [
            each.reduce_scatter(own),
            each.broadcast(own, 1),
            each.all_to_all(own, [1, 2], [[1, 1], [2, 2]][each.rank]),
        ]
        sending = each.isend(own, 1 - each.rank)
        results.append(each.recv(own, 1 - each.rank))
        sending.wait()
        each.barrier()
        return [result.cpu() for result in results]

    with ThreadPoolExecutor(len(group)) as pool:
        for rank, results in enumerate(pool.map(collect, group)):
            total = (parts[0].float() + parts[1].float()).to(dtype)
            expected = [total, torch.cat(parts), parts[0][:, :7], total.chunk(2, -1)[rank], parts[1]]
            expected.append(torch.cat([part[:1] if rank == 0 else part[1:] for part in parts]))
            expected.append(parts[1 - rank])
            assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gpus_give_the_bits_of_torch(dtype: torch.dtype) -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=60))
    with ThreadPoolExecutor(2) as pool:
        group = list(pool.map(lambda rank: TorchCollectives(store, rank, 2, host="127.0.0.1"), range(2)))
    try:
        run(group, dtype)
    finally:
        for each in group:
            each.close()
