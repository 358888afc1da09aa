"""Expert parallelism: what goes with it, what a rank has, and how ranks begin it. Importing this module loads no
torch."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from quire.config import QuireConfig
from quire.parallel.config import ParallelConfig
from quire_distributed.all2all_backends import DEVICE_LIBRARIES, refusal_of_backend
from quire_interfaces import ConfigError, SchedulerStats
from quire_models.config import ModelConfig
from quire_models.expert_placement import ExpertPlacement
from quire_models.feed_forward_spec import SparseMoESpec
from quire_models.spec import NetworkSpec

if TYPE_CHECKING:
    from quire_distributed import Collectives
    from quire_models.layers.expert_parallel import ExpertBalancer, ExpertParallel

__all__ = ["BalancerStats", "check_expert_parallel", "expert_parallel_of", "experts_of_rank"]


def check_expert_parallel(config: QuireConfig, model: ModelConfig) -> None:
    """Refuse what does not go with `enable_expert_parallel`, by name.

    Raises:
        ConfigError: a setting, or a model, that has nothing to share out.
    """
    parallel = config.parallel
    if not parallel.enable_expert_parallel:
        if parallel.enable_eplb:
            raise ConfigError(
                "enable_eplb moves experts between ranks that share them out; set enable_expert_parallel too",
                field="enable_eplb",
            )
        return
    size, num_experts = parallel.tensor_parallel_size, _fewest_experts(model)
    engines, redundant = config.data_parallel.data_parallel_size, _num_redundant(parallel)
    refusals = {
        "all2all_backend": (
            size > 1 and parallel.all2all_backend in DEVICE_LIBRARIES,
            refusal_of_backend(parallel.all2all_backend),
        ),
        "data_parallel_size": (
            engines > 1 and size == 1,
            "engines are independent, and experts are shared out between the tensor-parallel ranks of each: set "
            "tensor_parallel_size to their number",
        ),
        "model": (num_experts == 0, f"{model.architecture} has no routed experts; leave it out"),
        "tensor_parallel_size": (
            0 < num_experts < size,
            f"{size} ranks cannot share {num_experts} experts; take at most as many ranks",
        ),
        "eplb_config": (
            redundant > num_experts * (size - 1),
            f"num_redundant_experts is {redundant}, and a rank has an expert at most once: "
            f"{num_experts * (size - 1)} at most, of {num_experts} experts on {size} ranks",
        ),
    }
    for field, (is_set, reason) in refusals.items():
        if is_set:
            raise ConfigError(f"{field} does not go with enable_expert_parallel: {reason}", field=field)


def experts_of_rank(network: NetworkSpec, rank: int, parallel: ParallelConfig) -> NetworkSpec:
    """The network with as many experts as a rank has, for its plan."""
    size = parallel.tensor_parallel_size

    def own(spec: SparseMoESpec) -> SparseMoESpec:
        placement = ExpertPlacement.linear(spec.num_experts, size, _num_redundant(parallel))
        return dataclasses.replace(spec, num_local_experts=len(placement.of_rank[rank]))

    layers = [
        dataclasses.replace(layer, feed_forward=own(layer.feed_forward))
        if isinstance(layer.feed_forward, SparseMoESpec)
        else layer
        for layer in network.layers
    ]
    return dataclasses.replace(network, layers=tuple(layers))


def expert_parallel_of(parallel: ParallelConfig, group: Collectives) -> ExpertParallel | None:
    """What the layers of a rank's network share experts out with; None where each rank has all of them."""
    if not parallel.enable_expert_parallel:
        return None
    from quire_models.layers.expert_parallel import EplbSettings, share_experts

    eplb = EplbSettings(**(parallel.eplb_config or {})) if parallel.enable_eplb else None
    return share_experts(group, parallel.all2all_backend, eplb)


class BalancerStats:
    """Adds what a balancer of experts counts to a step's statistics.

    The balancedness of many steps and layers takes longer than a step may: it is at most `INTERVAL_S` old.
    """

    INTERVAL_S = 1.0

    def __init__(self, balancer: ExpertBalancer) -> None:
        self._balancer = balancer
        self._balancedness, self._next_s = 0.0, 0.0

    def __call__(self, stats: SchedulerStats) -> None:
        balancer, now = self._balancer, time.monotonic()
        if now >= self._next_s:
            self._balancedness, self._next_s = balancer.balancedness, now + self.INTERVAL_S
        stats.expert_balancedness = self._balancedness
        stats.num_expert_rebalances_total = balancer.num_rebalances
        stats.num_moved_experts_total = balancer.num_moved
        tokens = balancer.rank_tokens.tolist()
        stats.expert_rank_tokens_total = {str(rank): count for rank, count in enumerate(tokens)}


def _num_redundant(parallel: ParallelConfig) -> int:
    return (parallel.eplb_config or {}).get("num_redundant_experts", 0) if parallel.enable_eplb else 0


def _fewest_experts(model: ModelConfig) -> int:
    """Experts of the layer with the fewest; 0 where no layer has some."""
    parts = [layer.feed_forward for layer in model.network.layers]
    return min((part.num_experts for part in parts if isinstance(part, SparseMoESpec)), default=0)
