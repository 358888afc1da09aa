"""Tensor and pipeline parallelism: how many ranks share a model, what each of them gets of the plan, and what cannot
be shared yet.

Knows settings and plans; importing this module loads no torch.
"""

from __future__ import annotations

import dataclasses
import os

from quire.adapters import takes_adapters
from quire.compilation import chosen_compilation
from quire.config import QuireConfig
from quire.parallel.config import ParallelConfig
from quire.parallel.context_parallel import check_context_parallel
from quire.parallel.expert_parallel import check_expert_parallel, experts_of_rank
from quire.parallel.hosts_config import check_hosts
from quire.parallel.pipeline_parallel import check_stages
from quire_distributed import Mesh
from quire_interfaces import ConfigError, KVCachePlan
from quire_interfaces.platforms import platform_of
from quire_kv_cache import kv_plan_of_layers, plan_kv_cache
from quire_models.config import ModelConfig
from quire_models.sharding import interleave, shard
from quire_models.spec import NetworkSpec
from quire_models.stages import stage

__all__ = [
    "check_parallel",
    "config_of_ranks",
    "device_number",
    "devices_of_host",
    "interleaved",
    "kv_plan_of_rank",
    "mesh_of",
    "model_of_rank",
    "num_ranks_of_host",
    "on_device_of_rank",
    "ranks_of_host",
    "stage_of_rank",
]


def check_parallel(config: QuireConfig, model: ModelConfig) -> None:
    """Refuse what several ranks cannot share yet, by name.

    Raises:
        ConfigError: a setting, or a model, that goes with one rank only.
    """
    check_expert_parallel(config, model)
    check_context_parallel(config, model)
    parallel = config.parallel
    size, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    sizes = {"tensor_parallel_size": size, "pipeline_parallel_size": stages}
    large = [name for name, number in sizes.items() if number > 1]
    what = " and ".join(f"{name} {sizes[name]}" for name in large)
    if large and parallel.distributed_executor_backend == "uni":
        raise ConfigError(
            f"distributed_executor_backend uni is one process, not the {parallel.num_ranks} of {' and '.join(large)}; "
            "take mp",
            field="distributed_executor_backend",
        )
    check_hosts(
        config.hosts,
        num_ranks=parallel.num_ranks,
        headless=config.data_parallel.headless,
        backend=parallel.distributed_executor_backend,
        num_engines=config.data_parallel.data_parallel_size,
    )
    if not large:
        return
    refusals = {
        "distributed_executor_backend": (
            parallel.distributed_executor_backend == "ray" and not platform_of(config.runner.device).is_host,
            "Ray places ranks on CPUs only; take mp",
        ),
        "device": (
            not platform_of(config.runner.device).is_host
            and platform_of(config.runner.device).distributed_backend != "nccl",
            "ranks on devices talk to each other by NCCL, which this one has not; take cpu or cuda",
        ),
        "lora_merge_after": (
            config.lora.lora_merge_after > 0,
            "ranks would put an adapter into their weights at different steps; set it to 0",
        ),
        "async_scheduling": (
            config.engine.async_scheduling is True,
            "steps of several ranks are run one by one; leave it out",
        ),
        "nnodes": (
            ranks_of_host(config)[0] < size and (model.media is not None or config.media.enable_prompt_embeds),
            "media and embeddings lie in the memory of node 0, and the first stage has ranks elsewhere; give each host "
            "whole stages, or serve the language model alone, with --language-model-only",
        ),
        "mm_encoder_only": (config.model.mm_encoder_only, "towers are not shared; serve them with one rank"),
        "model": (
            model.is_encoder or (stages > 1 and not model.is_native),
            f"{model.architecture} is not shared between ranks: it would be computed whole by each; serve it with one"
            + ("" if model.is_encoder else ", or by tensor_parallel_size alone"),
        ),
        "enable_lora": (
            not model.is_native and takes_adapters(config),
            f"{model.architecture} runs through Transformers, whose layers take no adapters where ranks share them: "
            "serve it with one",
        ),
        "compilation_config": (
            not model.is_native and chosen_compilation(config, model) is not None,
            f"{model.architecture} is compiled for one rank; leave it out",
        ),
    }
    for field, (is_set, reason) in refusals.items():
        if is_set:
            raise ConfigError(f"{field} does not go with {what}: {reason}", field=field)
    if stages > 1:
        check_stages(config, model)


def config_of_ranks(config: QuireConfig) -> QuireConfig:
    """The settings of each of several ranks: a share of this machine's cores, steps one by one, and drafts of fixed
    lengths. Adaptive ones follow a clock, which differs between ranks. Stages have the same cores: one computes while
    the others wait."""
    size = ranks_of_host(config)[0]
    num_threads = config.runner.num_threads or max(1, len(os.sched_getaffinity(0)) // size)
    # Each rank would bind its threads to the same cores.
    runner = dataclasses.replace(config.runner, num_threads=num_threads, cpu_affinity="none")
    speculative = dataclasses.replace(config.speculative, adaptive=False)
    engine = dataclasses.replace(config.engine, async_scheduling=False)
    return dataclasses.replace(config, runner=runner, speculative=speculative, engine=engine)


def ranks_of_host(config: QuireConfig) -> tuple[int, int]:
    """Of the ranks of a host: how many share a stage, and number of stages."""
    tp, num_ranks = config.parallel.tensor_parallel_size, config.parallel.num_ranks // config.hosts.nnodes
    return min(tp, num_ranks), max(1, num_ranks // tp)


def num_ranks_of_host(config: QuireConfig) -> int:
    """How many ranks of an engine a host has."""
    return config.parallel.num_ranks // config.hosts.nnodes


def device_number(device: str) -> int:
    """Number of a device as a setting names it: 1 of "cuda:1", 0 of "cuda"."""
    number = device.partition(":")[2]
    return int(number) if number.isdigit() else 0


def devices_of_host(config: QuireConfig) -> list[str]:
    """Devices of an engine's ranks on a host, in the order of the ranks: the one that the settings name (the first,
    where they give no number) and those behind it; the same for all on the CPU."""
    device, num_ranks = config.runner.device, num_ranks_of_host(config)
    platform = platform_of(device)
    if platform.is_host or num_ranks == 1:
        return [device] * num_ranks
    first = device_number(device)
    return [f"{platform.name}:{first + rank}" for rank in range(num_ranks)]


def on_device_of_rank(config: QuireConfig, rank: int) -> QuireConfig:
    """The settings of a rank, with the device that it has.

    Args:
        config: Settings of all ranks; their device is that of the first rank of each host.
        rank: Number of the rank in the engine.
    """
    device = devices_of_host(config)[rank % num_ranks_of_host(config)]
    return dataclasses.replace(config, runner=dataclasses.replace(config.runner, device=device))


def interleaved(model: ModelConfig, parallel: ParallelConfig) -> ModelConfig:
    """The network whose caches are interleaved over ranks; as it is where they are not."""
    return dataclasses.replace(model, network=interleave(model.network, parallel.decode_context_parallel_size))


def model_of_rank(model: ModelConfig, rank: int, parallel: ParallelConfig) -> ModelConfig:
    """The part of a network that a rank has, all stages together, for its plan."""
    return dataclasses.replace(model, network=_with_experts(_sharded(model, rank, parallel), rank, parallel))


def stage_of_rank(model: ModelConfig, rank: int, parallel: ParallelConfig) -> NetworkSpec:
    """The part of a network that a rank has: layers are dealt out by the weights of all experts, as when they load."""
    mesh = mesh_of(parallel, rank)
    return _with_experts(stage(_sharded(model, mesh.tp_rank, parallel), mesh.pp_rank, mesh.pp), mesh.tp_rank, parallel)


def _sharded(model: ModelConfig, rank: int, parallel: ParallelConfig) -> NetworkSpec:
    return shard(interleaved(model, parallel).network, rank, parallel.tensor_parallel_size)


def _with_experts(network: NetworkSpec, rank: int, parallel: ParallelConfig) -> NetworkSpec:
    return experts_of_rank(network, rank, parallel) if parallel.enable_expert_parallel else network


def mesh_of(parallel: ParallelConfig, rank: int = 0) -> Mesh:
    """The layout of the ranks, as one of them sees it."""
    return Mesh(tp=parallel.tensor_parallel_size, pp=parallel.pipeline_parallel_size, rank=rank)


def kv_plan_of_rank(
    model: ModelConfig, plan: KVCachePlan, block_size: int, cache_dtype: str, rank: int, parallel: ParallelConfig
) -> KVCachePlan:
    """The KV cache of a rank: the blocks of the engine's, with the rank's own heads and layers."""
    mesh = mesh_of(parallel, rank)
    specs = model_of_rank(model, mesh.tp_rank, parallel).kv_cache_specs(block_size, cache_dtype)
    whole = plan_kv_cache(specs, num_blocks=plan.num_blocks)
    return whole if mesh.pp == 1 else kv_plan_of_layers(whole, stage_of_rank(model, rank, parallel).cache_names())
