"""The ranks beside rank 0: how an engine starts them, and what each of them runs. Importing this module loads no torch.

Knows processes, payloads and adapters; how a rank's network and runner are made, `quire.assemble` knows.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import quire_distributed
from quire.config import QuireConfig
from quire.kv_tier import EngineTiers
from quire.parallel.collective_rpc import RankCalls
from quire.parallel.expert_parallel import BalancerStats
from quire.parallel.host_ranks import are_elsewhere, start_ranks_elsewhere
from quire.parallel.rank_groups import RankGroups
from quire.parallel.tensor_parallel import kv_plan_of_rank, mesh_of, on_device_of_rank
from quire.plan import MemoryPlan
from quire_distributed import Mesh
from quire_distributed.executor import MultiprocExecutor, start_ranks
from quire_distributed.host_ranks import join_with, start_ranks_of_hosts
from quire_distributed.pipeline_executor import PipelineExecutor
from quire_distributed.rank_handle import RankHandle
from quire_interfaces import KVCachePlan, ModelRunnerOutput, RankDeadError, SchedulerOutput, SchedulerStats
from quire_interfaces.platforms import platform_of
from quire_models.config import ModelConfig

if TYPE_CHECKING:
    from quire_lora import AdapterStore
    from quire_models import Network
    from quire_runner import ModelRunner, PipelineRunner

__all__ = ["OtherRanks", "RankPayload", "RankWorker", "rank_payloads", "start_other_ranks"]

BUILD = "quire.assemble:build_rank_worker"
"""What a rank's process calls."""


class RankPayload(NamedTuple):
    """What a rank's process is told."""

    config: dict[str, Any]
    """Settings, as `QuireConfig.to_dict` gives them."""
    plan: MemoryPlan
    """Rank 0's, with the rank's own KV cache."""


class OtherRanks(NamedTuple):
    """The ranks beside rank 0, as rank 0 sees them."""

    processes: Sequence[RankHandle]
    groups: RankGroups
    """Rank 0's ends of its groups."""
    kv_plan: KVCachePlan
    """Of rank 0's layers and heads."""

    def executor(
        self,
        runner: ModelRunner,
        store: AdapterStore | None,
        network: Network,
        add_stats: list[Callable[[SchedulerStats], None]],
        tiers: EngineTiers | None = None,
        *,
        ends_process: bool = False,
    ) -> MultiprocExecutor | PipelineExecutor:
        """What runs steps on all ranks, once those beside rank 0 are ready.

        Args:
            runner: Rank 0's.
            store: Rank 0's adapters, which the other ranks read when a request needs them.
            network: Rank 0's part.
            add_stats: Gets what adds the counts of its experts' balancer, where it has one.
            tiers: Rank 0's; None where there are none, and no connector.
            ends_process: Whether this process ends when a rank is gone and no step is there to say so: that of an
                engine, which is then started again.

        Raises:
            RankDeadError: A rank could not start.
        """
        for process in self.processes:
            process.wait_until_ready()
        if network.expert_balancer is not None:
            add_stats.append(BalancerStats(network.expert_balancer))
        executor: MultiprocExecutor | PipelineExecutor
        if self.groups.pp is None:
            executor = MultiprocExecutor(runner, self.processes, self.groups.world)
        else:
            stage = cast("PipelineRunner", runner)
            executor = PipelineExecutor(stage, self.processes, self.groups.all, self.groups.mesh)
        if tiers is not None:
            tiers.connect_ranks(executor)
        if ends_process:
            executor.on_idle_failure = _end_process
        if store is not None:
            executor.before_step = _adapters_of(executor, store)
        return executor

    def close(self) -> None:
        """End the processes, where the engine could not start."""
        for process in self.processes:
            process.close()
        self.groups.close()


def start_other_ranks(config: QuireConfig, folder: Path, model: ModelConfig, plan: MemoryPlan) -> OtherRanks:
    """Start ranks 1, 2, ..., and join their group.

    Args:
        config: Settings of every rank.
        folder: Of the model here.
        model: The whole network, its context cut to the plan's.
        plan: Rank 0's.

    Raises:
        RankDeadError: A rank ended before it joined.
    """
    mesh, kv_plans, payloads = rank_payloads(config, model, plan)
    size = mesh.world_size
    if are_elsewhere(config):
        handles, everyone = start_ranks_elsewhere(config, folder, BUILD, payloads)
        return OtherRanks(handles, RankGroups.of(everyone, mesh), kv_plans[0])
    if not platform_of(config.runner.device).is_host:
        silence_s = config.hosts.distributed_timeout_seconds
        local, everyone = start_ranks_of_hosts(BUILD, payloads, None, {}, master_addr="127.0.0.1", silence_s=silence_s)
        return OtherRanks(local, RankGroups.of(everyone, mesh), kv_plans[0])
    with quire_distributed.SharedMemoryRendezvous(size) as rendezvous:
        processes = start_ranks(size, BUILD, payloads, rendezvous.fd)
        try:
            world = join_with(processes, lambda: quire_distributed.SharedMemoryCollectives(rendezvous.address, 0, size))
        except BaseException:
            for process in processes:
                process.close()
            raise
    return OtherRanks(processes, RankGroups.of(world, mesh), kv_plans[0])


def _end_process(failure: RankDeadError) -> None:
    """End the engine's process, which is started again with all its ranks."""
    print(failure, file=sys.stderr, flush=True)
    os._exit(1)


def rank_payloads(
    config: QuireConfig, model: ModelConfig, plan: MemoryPlan
) -> tuple[Mesh, list[KVCachePlan], list[RankPayload]]:
    """The layout as rank 0 sees it, the KV cache of each rank, and what ranks 1, 2, ... are told. Arguments as those of
    `start_other_ranks`."""
    mesh = mesh_of(config.parallel)
    kv_plans = [
        kv_plan_of_rank(model, plan.kv_plan, plan.block_size, plan.kv_cache_dtype, rank, config.parallel)
        for rank in range(mesh.world_size)
    ]
    payloads = [
        RankPayload(on_device_of_rank(config, rank).to_dict(), dataclasses.replace(plan, kv_plan=kv_plan))
        for rank, kv_plan in enumerate(kv_plans[1:], 1)
    ]
    return mesh, kv_plans, payloads


def _adapters_of(
    executor: MultiprocExecutor | PipelineExecutor, store: AdapterStore
) -> Callable[[SchedulerOutput], None]:
    """What has the other ranks read the adapters of a step's new rows."""

    def before_step(output: SchedulerOutput) -> None:
        versions = dict.fromkeys(new.adapter_version for new in output.new_rows if new.adapter_slot >= 0)
        for version in versions:
            executor.call("fetch_adapter", version, str(store.folder(version)))

    return before_step


class RankWorker:
    """What a rank beside rank 0 runs (`quire_distributed.worker.Worker`)."""

    def __init__(
        self,
        runner: ModelRunner,
        store: AdapterStore | None,
        tiers: EngineTiers | None,
        rank_calls: RankCalls,
        groups: RankGroups,
    ) -> None:
        self._runner, self._store, self._groups = runner, store, groups
        self._calls: dict[str, Callable[..., Any]] = {
            "collective_rpc": rank_calls,
            "fetch_adapter": self._fetch_adapter,
            "release_kv_cache": runner.release_kv_cache,
            "take_sampled": self._take_sampled,
        }
        if tiers is not None:
            self._calls["hold_blocks"] = tiers.hold_blocks

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; raises what computing it raised, and RankDeadError where a rank is gone."""
        self._groups.check()
        result = self._runner.run(output)
        self._groups.check()
        return result

    def call(self, name: str, *arguments: Any) -> Any:
        """Do what rank 0 has done between two steps: read an adapter, or give the KV cache's memory back."""
        return self._calls[name](*arguments)

    def close(self) -> None:
        """Give all memory back."""
        self._runner.close()
        if self._store is not None:
            self._store.close()

    def _take_sampled(self, step_id: int, rows: list[int], token_ids: list[list[int]]) -> None:
        """Learn what the last stage sampled in a step."""
        cast("PipelineRunner", self._runner).take_sampled(step_id, rows, token_ids)

    def _fetch_adapter(self, version: str, folder: str) -> None:
        """Have a version in host memory; it is named by itself here, since rank 0 knows the names."""
        assert self._store is not None
        known = {info.name for info in self._store.loaded()}
        if version in known:
            self._store.fetch(version).result()
            return
        info = self._store.load(version, folder).result()
        if info.version != version:
            raise RuntimeError(f"the files of the adapter in {folder!r} have changed since rank 0 read them")
