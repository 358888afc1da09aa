"""What of the host each of several engines of one model gets."""

from __future__ import annotations

import dataclasses
import os

from quire.config import QuireConfig
from quire.parallel.data_parallel import DataParallelConfig, engine_ranks
from quire.parallel.tensor_parallel import device_number, num_ranks_of_host
from quire_interfaces.platforms import platform_of
from quire_runner.affinity import split_cores

__all__ = ["rank_config"]


def rank_config(config: QuireConfig, rank: int) -> QuireConfig:
    """Settings of one of the engines of this host: its rank, and its part of the cores and of the memory, or its first
    GPU.

    Args:
        config: Settings of all of them.
        rank: One of `engine_ranks`, or one behind them, of an engine that is added.
    """
    ranks = engine_ranks(config.data_parallel)
    place = rank - ranks.first
    size = max(ranks.size, place + 1)
    num_all = max(config.data_parallel.data_parallel_size, rank + 1)
    own = DataParallelConfig(data_parallel_size=num_all, data_parallel_rank=rank)
    config = dataclasses.replace(config, data_parallel=own)
    if size == 1:
        return config
    runner, model = config.runner, config.model
    platform = platform_of(runner.device)
    num_ranks = num_ranks_of_host(config)
    if not platform.is_host and (num_ranks > 1 or runner.device == platform.name):
        first = device_number(runner.device) + place * num_ranks
        return dataclasses.replace(config, runner=dataclasses.replace(runner, device=f"{platform.name}:{first}"))
    share = model.gpu_memory_utilization / size  # of the same memory
    model = dataclasses.replace(model, gpu_memory_utilization=share)
    if platform.is_host:
        cores, num_physical = split_cores(runner.cpu_affinity, size)[place]
        if config.parallel.num_ranks > 1:  # of each engine: threads of ranks are bound to no cores
            num_cores = num_physical if cores else max(1, (os.cpu_count() or 1) // size)
            num_threads = runner.num_threads or max(1, num_cores // config.parallel.tensor_parallel_size)
            affinity = "none"
        elif cores and (runner.num_threads or 0) <= len(cores):
            num_threads = runner.num_threads or num_physical
            affinity = ",".join(map(str, cores))
        else:
            num_threads = runner.num_threads or max(1, (os.cpu_count() or 1) // size)
            affinity = "none"
        runner = dataclasses.replace(runner, num_threads=num_threads, cpu_affinity=affinity)
    return dataclasses.replace(config, model=model, runner=runner)
