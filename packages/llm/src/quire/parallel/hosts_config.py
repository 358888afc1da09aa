"""Settings of engines whose ranks are on several hosts. Starts nothing (`quire.parallel.host_ranks`)."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import ConfigError, Settings, at_least, between, setting

__all__ = ["HostsConfig", "check_hosts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsConfig(Settings):
    """Hosts that share one model. Names and defaults are vLLM's, but for `node_secret`, which vLLM has none of."""

    nnodes: int = setting(
        1,
        help="Hosts that the ranks of the model are on, as many on each. The one of node_rank 0 has the server.",
        unit="hosts",
        check=at_least(1),
    )
    node_rank: int = setting(
        0, help="Number of this host among nnodes; those above 0 run with --headless.", check=at_least(0)
    )
    master_addr: str = setting(
        "127.0.0.1", help="Address of the host of node_rank 0, as all hosts reach it.", nonempty=True
    )
    master_port: int = setting(
        29501, help="Port of that host where the others find the engine.", check=between(1, 65535)
    )
    distributed_timeout_seconds: float = setting(
        10.0,
        help="How long nothing may be heard of another host before its ranks count as gone. A process that ended is "
        "noticed sooner.",
        unit="s",
        check=between(1.0, 3600.0),
    )
    node_secret: str | None = setting(
        None,
        help="What all hosts must know to take part; without it any host that reaches master_port may, as on the "
        "trusted network that vLLM asks for.",
        secret=True,
        nonempty=True,
    )

    @property
    def secret(self) -> bytes:
        """`node_secret` as bytes; empty for none."""
        return (self.node_secret or "").encode()


def check_hosts(config: HostsConfig, *, num_ranks: int, headless: bool, backend: str | None, num_engines: int) -> None:
    """Refuse settings of hosts that contradict each other.

    Args:
        config: They.
        num_ranks: Ranks of one engine, of all hosts.
        headless: Whether this host has no server.
        backend: `distributed_executor_backend`.
        num_engines: `data_parallel_size`.

    Raises:
        ConfigError: by the field that is wrong.
    """
    if config.node_rank >= config.nnodes:
        raise ConfigError(
            f"node_rank {config.node_rank} is none of nnodes {config.nnodes}, which are numbered from 0",
            field="node_rank",
        )
    if config.nnodes == 1:
        return
    if config.node_rank and not headless:
        raise ConfigError(
            f"node_rank {config.node_rank} runs ranks alone, without a server, which node_rank 0 has: add --headless",
            field="headless",
        )
    if headless and not config.node_rank:
        raise ConfigError("node_rank 0 has the server and cannot be headless: leave out --headless", field="headless")
    if num_ranks % config.nnodes:
        raise ConfigError(
            f"{num_ranks} ranks (tensor_parallel_size and what multiplies it) cannot be spread evenly over nnodes "
            f"{config.nnodes}",
            field="nnodes",
        )
    if backend not in (None, "mp"):
        raise ConfigError(
            f"distributed_executor_backend {backend} does not go with nnodes {config.nnodes}; mp does",
            field="distributed_executor_backend",
        )
    if num_engines > 1:
        raise ConfigError(
            f"data_parallel_size {num_engines} does not go with nnodes {config.nnodes}: start a server "
            "for each engine, with a master_port of its own and without data_parallel_size, behind a load balancer",
            field="data_parallel_size",
        )
