"""Ranks that Ray places: each is an actor in a bundle of a placement group, and gets its steps over a channel of ours.

Ray says where ranks run, starts and ends them; steps do not go through its object store, and the end of an actor's
process is known as soon as its connection ends. Knows actors; knows no network. Imports Ray when it is first asked.
"""

from __future__ import annotations

import importlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import quire_distributed
from quire_distributed.collectives import Collectives
from quire_distributed.host_ranks import join_with
from quire_distributed.rank_handle import RankEnd, RankHandle
from quire_distributed.rank_listener import RankListener, RemoteRank
from quire_distributed.signed_channel import connect_channel
from quire_distributed.worker import RankSpec, SharedMemoryGroup, TorchGroup, run_rank
from quire_interfaces import ConfigError

__all__ = ["RankActor", "import_ray", "start_ranks_by_ray"]

_PLACE_S = 60.0
"""How long Ray may take to place the ranks and to start their processes."""
_NUM_STARTS = 3
"""How often a cluster is tried to be started or reached: Ray itself waits 30 s, too few on a busy host."""
_JOIN_S = 300.0
_LAST_WORDS_S = 0.5
"""After a rank's connection has ended, how long Ray may take to say why."""


class RankActor:
    """What runs in an actor's process."""

    def place(self, address: str) -> tuple[str, bool]:
        """The node that it is on, and whether shared memory of rank 0's can be opened there."""
        try:
            os.close(os.open(address, os.O_RDWR))
        except OSError:
            return import_ray().get_runtime_context().get_node_id(), False
        return import_ray().get_runtime_context().get_node_id(), True

    def run(self, spec: RankSpec, address: tuple[str, int], secret: bytes, silence_s: float) -> int:
        """Be a rank until rank 0 is gone, or says so."""
        return run_rank(spec, connect_channel(address, {"rank": spec.rank}, secret, silence_s=silence_s))


def import_ray() -> Any:
    """The module `ray`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"distributed_executor_backend ray needs Ray ({error}): install quire-distributed[ray]",
            field="distributed_executor_backend",
        ) from None


def start_ranks_by_ray(
    build: str, payloads: Sequence[Any], *, num_cpus: int, silence_s: float
) -> tuple[list[RankHandle], Collectives]:
    """The ranks beside rank 0 as actors, and rank 0's end of their group, once all have joined it.

    Connects to the Ray cluster of RAY_ADDRESS, else to one that runs on this host, else starts one of its own. Where
    all actors are on this host, the ranks meet in shared memory, else by torch.distributed.

    Args:
        build: A `quire_distributed.worker.BuildWorker` as "module:function".
        payloads: What it is given, for ranks 1, 2, ...
        num_cpus: CPUs that each rank takes of the cluster's.
        silence_s: How long nothing may be heard of a rank of another host before it counts as gone.

    Raises:
        ConfigError: Ray is not installed, or cannot place the ranks.
        RankDeadError: A rank ended before it joined.
    """
    ray = import_ray()
    _connect(ray)
    size = len(payloads) + 1
    group = ray.util.placement_group([{"CPU": num_cpus}] * len(payloads), strategy="PACK")
    cleanups: list[Any] = [partial(ray.util.remove_placement_group, group)]
    ranks: list[RankHandle] = []
    host = ray.util.get_node_ip_address()
    secret = secrets.token_bytes(32)
    try:
        if not group.wait(_PLACE_S):
            raise ConfigError(
                f"Ray cannot place {len(payloads)} ranks of {num_cpus} CPU each beside rank 0 (it has "
                f"{ray.available_resources().get('CPU', 0):g} free): give it more, or each rank a smaller num_threads",
                field="distributed_executor_backend",
            )
        actors = [_actor(ray, group, place, num_cpus) for place in range(len(payloads))]
        with (
            quire_distributed.SharedMemoryRendezvous(size) as shared,
            RankListener(host, 0, secret, silence_s=silence_s) as listener,
        ):
            places = ray.get([actor.place.remote(shared.address) for actor in actors], timeout=_PLACE_S)
            here = ray.get_runtime_context().get_node_id()
            rendezvous = None
            meeting: SharedMemoryGroup | TorchGroup = SharedMemoryGroup(shared.address)
            if not all(node == here and is_open for node, is_open in places):
                rendezvous = quire_distributed.TorchRendezvous(host, 0, 0, size, timeout_s=_JOIN_S)
                meeting = TorchGroup(host, rendezvous.port, silence_s)
            specs = [
                RankSpec(rank, size, build, payload, meeting, list(sys.path))
                for rank, payload in enumerate(payloads, 1)
            ]
            runs = [
                actor.run.remote(spec, (host, listener.port), secret, silence_s)
                for actor, spec in zip(actors, specs, strict=True)
            ]
            causes = {spec.rank: partial(_cause_of_absence, ray, run) for spec, run in zip(specs, runs, strict=True)}
            channels = listener.wait_for_ranks(causes, _PLACE_S)
            for spec, actor, run in zip(specs, actors, runs, strict=True):
                release = partial(_release, ray, actor, group if spec.rank == size - 1 else None)
                ranks.append(RemoteRank(spec.rank, channels[spec.rank], partial(_cause_of_end, ray, run), release))
            meet: Callable[[], Collectives]
            if rendezvous is not None:
                meet = partial(rendezvous.group, "ranks", range(size), silence_s=silence_s)
            else:
                meet = partial(quire_distributed.SharedMemoryCollectives, shared.address, 0, size)
            return ranks, join_with(ranks, meet)
    except BaseException:
        for rank in ranks:
            rank.close()
        for cleanup in cleanups:
            cleanup()
        raise


def _connect(ray: Any) -> None:
    """Reach the cluster, or start one. Raises ConfigError where that fails."""
    for num_left in reversed(range(_NUM_STARTS)):
        if ray.is_initialized():
            return
        try:
            ray.init(log_to_driver=True, include_dashboard=False, logging_level="warning")
        except Exception as error:  # of many types, some of them plain
            ray.shutdown()
            if num_left == 0:
                raise ConfigError(
                    f"Ray cannot be reached or started: {error}", field="distributed_executor_backend"
                ) from error


def _actor(ray: Any, group: Any, place: int, num_cpus: int) -> Any:
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=place
    )
    return (
        ray.remote(RankActor)
        .options(
            num_cpus=num_cpus,
            max_restarts=0,
            scheduling_strategy=strategy,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}},
        )
        .remote()
    )


def _release(ray: Any, actor: Any, group: Any) -> None:
    ray.kill(actor)
    if group is not None:
        ray.util.remove_placement_group(group)


def _cause_of_absence(ray: Any, run: Any) -> RankEnd | None:
    """Why an actor will not connect; None where it may."""
    return _outcome(ray, run) if ray.wait([run], timeout=0)[0] else None


def _cause_of_end(ray: Any, run: Any) -> RankEnd:
    deadline_s = time.monotonic() + _LAST_WORDS_S
    while time.monotonic() < deadline_s:
        if ray.wait([run], timeout=0.05)[0]:
            return _outcome(ray, run)
    return RankEnd("its actor's process is gone")


def _outcome(ray: Any, run: Any) -> RankEnd:
    """How the call that a rank lives in has ended."""
    try:
        return RankEnd(f"its actor ended with status {ray.get(run)}")
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return RankEnd(f"its actor died: {' '.join(lines)[:400]}")
