"""Ranks that are not all processes of this host: those of other hosts, and those that Ray places. No torch is loaded.

Knows settings and what a host is told; how hosts are reached, `quire_distributed` knows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config import QuireConfig
from quire.parallel.tensor_parallel import on_device_of_rank, ranks_of_host
from quire_distributed.host_ranks import start_ranks_of_hosts
from quire_distributed.node import serve_node
from quire_distributed.rank_handle import RankHandle
from quire_distributed.rank_listener import RankListener
from quire_distributed.ray_ranks import start_ranks_by_ray
from quire_distributed.worker import RankSpec
from quire_interfaces import ConfigError

if TYPE_CHECKING:
    from quire_distributed import Collectives

__all__ = ["are_elsewhere", "model_digest", "run_node", "start_ranks_elsewhere"]

_logger = logging.getLogger(__name__)


def are_elsewhere(config: QuireConfig) -> bool:
    """Whether ranks may be on other hosts."""
    return config.hosts.nnodes > 1 or config.parallel.distributed_executor_backend == "ray"


def start_ranks_elsewhere(
    config: QuireConfig, folder: Path, build: str, payloads: Sequence[Any]
) -> tuple[list[RankHandle], Collectives]:
    """The ranks beside rank 0, and rank 0's end of their group, once all have joined it.

    Args:
        config: Settings.
        folder: Of the model here.
        build: What makes a rank's worker, as "module:function".
        payloads: What it is given, for ranks 1, 2, ...

    Raises:
        ConfigError: A host did not come, or has another model; Ray is missing, or has no room.
        RankDeadError: A rank ended before it joined.
    """
    hosts = config.hosts
    silence_s = hosts.distributed_timeout_seconds
    if config.parallel.distributed_executor_backend == "ray":
        return start_ranks_by_ray(build, payloads, num_cpus=config.runner.num_threads or 1, silence_s=silence_s)
    if not hosts.secret:
        _logger.warning(
            "no --node-secret is set: any host that reaches %s:%d may take part", hosts.master_addr, hosts.master_port
        )
    with RankListener(hosts.master_addr, hosts.master_port, hosts.secret, silence_s=silence_s) as listener:
        nodes = listener.wait_for_nodes(
            range(1, hosts.nnodes),
            config.engine.startup_timeout_s,
            lambda missing: _logger.info("waiting for node %s", ", ".join(map(str, missing))),
        )
        own = model_digest(folder)
        for number, node in nodes.items():
            if node.hello.get("model") != own:
                cause = (
                    f"node {number} has other files of the model than node 0: give it the same --model, of the same "
                    "revision"
                )
                node.refuse(cause)
                raise ConfigError(cause, field="model")
        return start_ranks_of_hosts(
            build, payloads, listener, nodes, master_addr=hosts.master_addr, silence_s=silence_s
        )


def run_node(config: QuireConfig, folder: Path, is_stopping: threading.Event) -> None:
    """Run this host's ranks whenever the engine of node 0 asks for them, until `is_stopping` is set.

    Args:
        config: Settings of this host.
        folder: Of the model here.

    Raises:
        ConfigError: Node 0 refused this host.
    """
    hosts = config.hosts
    serve_node(
        (hosts.master_addr, hosts.master_port),
        hosts.node_rank,
        {"model": model_digest(folder)},
        secret=hosts.secret,
        silence_s=hosts.distributed_timeout_seconds,
        localize=_localizer(config, folder),
        is_stopping=is_stopping,
    )


def _localizer(config: QuireConfig, folder: Path) -> Callable[[RankSpec], RankSpec]:
    """What gives a rank this host's place of the model, its cores and one of its devices."""
    sharers = ranks_of_host(config)[0]
    num_threads = config.runner.num_threads or max(1, len(os.sched_getaffinity(0)) // sharers)
    tokenizer = config.model.tokenizer

    def localize(spec: RankSpec) -> RankSpec:
        settings = QuireConfig.from_dict(spec.payload.config)
        model = dataclasses.replace(settings.model, model=str(folder), tokenizer=tokenizer)
        runner = dataclasses.replace(settings.runner, num_threads=num_threads, device=config.runner.device)
        settings = on_device_of_rank(dataclasses.replace(settings, model=model, runner=runner), spec.rank)
        return spec._replace(payload=spec.payload._replace(config=settings.to_dict()))

    return localize


def model_digest(folder: Path) -> str:
    """What tells whether two hosts have the same model: a hash of config.json, and of names and sizes of weights."""
    digest = hashlib.sha256()
    files = [folder] if folder.is_file() else sorted(folder.iterdir())
    for path in files:
        if path.name == "config.json":
            digest.update(path.read_bytes())
        elif path.suffix in (".safetensors", ".gguf", ".bin", ".pt"):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()
