"""Data parallel: how many engines serve one model, and which ranks they have.

Knows its own settings; starts nothing (`quire_engine.EnginePool` does).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from quire_interfaces import ConfigError, Settings, at_least, between, setting

__all__ = ["DataParallelConfig", "EngineRanks", "engine_ranks", "has_remote_engines", "pool_ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelConfig(Settings):
    """Engines of one model. Names and defaults are vLLM's."""

    data_parallel_size: int = setting(
        1,
        help="Engines that serve the model, each with all weights and a KV cache of its own; more requests run at the "
        "same time. The server sends each request to the one that has its prefix, or the least to do.",
        unit="engines",
        check=at_least(1),
    )
    data_parallel_size_local: int | None = setting(
        None,
        help="Engines of this host, of the data_parallel_size of all hosts together; empty: all of them.",
        unit="engines",
        check=at_least(0),
    )
    data_parallel_rank: int | None = setting(
        None,
        help="Rank of this server's one engine, where each server has one and a load balancer stands before them "
        "(--data-parallel-external-lb).",
        check=at_least(0),
    )
    data_parallel_start_rank: int | None = setting(
        None,
        help="Rank of this host's first engine, with --headless or --data-parallel-hybrid-lb; empty: 0.",
        check=at_least(0),
    )
    data_parallel_hybrid_lb: bool = setting(
        False,
        help="Several servers, each of which balances over its own engines, behind a load balancer.",
    )
    data_parallel_external_lb: bool = setting(
        False,
        help="Several servers with one engine each, behind a load balancer; --data-parallel-rank says so, too.",
    )
    data_parallel_backend: str = setting(
        "mp",
        help="What runs the engines: mp, processes of this host.",
        check=lambda value: (
            None
            if value == "mp"
            else "be mp: Ray does not place engines. Give other hosts theirs by --headless and "
            "--data-parallel-start-rank; Ray places the ranks of one engine, by --distributed-executor-backend ray"
        ),
    )
    data_parallel_address: str = setting(
        "127.0.0.1",
        help="Address of the host that has the server, as all hosts reach it, where others have engines (--headless).",
        nonempty=True,
    )
    data_parallel_rpc_port: int = setting(
        29550, help="Port of that host where the others find the server.", check=between(1, 65535)
    )
    enable_elastic_ep: bool = setting(
        False,
        help="Let POST /scale_elastic_ep add engines to a server that begins with one; with several it may anyway.",
    )
    headless: bool = setting(
        False,
        help="No server: this host runs engines of a server on another host (--data-parallel-start-rank), or ranks of "
        "an engine whose server is on the host of node_rank 0 (--nnodes).",
    )


class EngineRanks(NamedTuple):
    """The engines of one host, or of one server."""

    first: int
    size: int

    @property
    def is_alone(self) -> bool:
        """Whether there is one engine, and no other server with more of them."""
        return self == (0, 1)


def pool_ranks(config: DataParallelConfig) -> EngineRanks:
    """Which engines this server sends requests to, those of other hosts among them. Raises as `engine_ranks`."""
    own = engine_ranks(config)
    return EngineRanks(0, config.data_parallel_size) if has_remote_engines(config) else own


def has_remote_engines(config: DataParallelConfig) -> bool:
    """Whether engines of other hosts (--headless) belong to this server."""
    local, is_internal = (
        config.data_parallel_size_local,
        not (
            config.data_parallel_hybrid_lb or config.data_parallel_external_lb or config.data_parallel_rank is not None
        ),
    )
    return is_internal and not config.headless and local is not None and local < config.data_parallel_size


def engine_ranks(config: DataParallelConfig) -> EngineRanks:
    """Which engines this host has.

    Raises:
        ConfigError: settings that contradict each other.
    """
    return EngineRanks(0, 1) if config == DataParallelConfig() else _ranks_of_several(config)


def _ranks_of_several(config: DataParallelConfig) -> EngineRanks:
    """Which engines this server has, where there may be others. Raises as `engine_ranks`."""
    size, local = config.data_parallel_size, config.data_parallel_size_local
    rank, start = config.data_parallel_rank, config.data_parallel_start_rank
    is_external = config.data_parallel_external_lb or rank is not None
    if is_external and config.data_parallel_hybrid_lb:
        raise ConfigError(
            "data_parallel_hybrid_lb is for servers with several engines, and data_parallel_external_lb and "
            "data_parallel_rank for servers with one: leave out one of them",
            field="data_parallel_hybrid_lb",
        )
    if config.headless and (is_external or config.data_parallel_hybrid_lb):
        raise ConfigError(
            "headless is for engines of a server on another host, and data_parallel_hybrid_lb, "
            "data_parallel_external_lb and data_parallel_rank for hosts with a server of their own: leave out one",
            field="headless",
        )
    if is_external:
        return _external_ranks(config)
    if local is not None and local > size:
        raise ConfigError(
            f"data_parallel_size_local {local} is more than data_parallel_size {size}, which counts the engines of all "
            "servers: raise data_parallel_size",
            field="data_parallel_size_local",
        )
    if config.headless and (local is not None or start is not None):
        first = start or 0
        local = size - first if local is None else local
        if not local or first + local > size:
            raise ConfigError(
                f"data_parallel_start_rank {first} and data_parallel_size_local {local} are no ranks of "
                f"data_parallel_size {size}",
                field="data_parallel_start_rank",
            )
        return EngineRanks(first, local)
    if config.data_parallel_hybrid_lb:
        if local is None:
            raise ConfigError(
                "data_parallel_hybrid_lb wants data_parallel_size_local, the number of this server's engines",
                field="data_parallel_size_local",
            )
        if (start or 0) + local > size:
            raise ConfigError(
                f"data_parallel_start_rank {start or 0} and data_parallel_size_local {local} make ranks up to "
                f"{(start or 0) + local - 1}, and data_parallel_size {size} has none above {size - 1}",
                field="data_parallel_start_rank",
            )
        return EngineRanks(start or 0, local)
    if start:
        raise ConfigError(
            f"data_parallel_start_rank {start} is for hosts behind the first one: add --headless where the server is "
            "on another host, or --data-parallel-hybrid-lb where each has one",
            field="data_parallel_start_rank",
        )
    return EngineRanks(0, size if local is None else local)


def _external_ranks(config: DataParallelConfig) -> EngineRanks:
    """One engine of several servers' engines. Raises as `engine_ranks`."""
    size, rank = config.data_parallel_size, config.data_parallel_rank
    if rank is None:
        raise ConfigError(
            "data_parallel_external_lb wants data_parallel_rank, the rank of this server's engine",
            field="data_parallel_rank",
        )
    if rank >= size:
        raise ConfigError(
            f"data_parallel_rank must be less than data_parallel_size, which is {size}, got {rank}",
            field="data_parallel_rank",
        )
    if config.data_parallel_size_local not in (None, 1):
        raise ConfigError(
            f"data_parallel_rank is for a server with one engine, and data_parallel_size_local is "
            f"{config.data_parallel_size_local}: use --data-parallel-hybrid-lb and --data-parallel-start-rank {rank}",
            field="data_parallel_size_local",
        )
    if config.data_parallel_start_rank not in (None, rank):
        raise ConfigError(
            "data_parallel_start_rank goes with --data-parallel-hybrid-lb, and not with data_parallel_rank: leave it "
            "out",
            field="data_parallel_start_rank",
        )
    return EngineRanks(rank, 1)
