"""`quire serve --headless`: a host that runs ranks of an engine whose server is on another host. No HTTP, no torch."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType

from quire import QuireConfig
from quire.assemble import model_folder
from quire.demo import seeing_demo
from quire.parallel.data_parallel import engine_ranks
from quire.parallel.engine_nodes import serve_engines
from quire.parallel.host_ranks import model_digest, run_node
from quire.parallel.hosts_config import check_hosts
from quire_interfaces import ConfigError
from quire_server.config import ServerConfig
from quire_server.exit_status import ExitStatus
from quire_server.log_settings import begin_logging

__all__ = ["serve_headless"]

_logger = logging.getLogger(__name__)


def serve_headless(config: QuireConfig, server: ServerConfig) -> ExitStatus:
    """Run this host's engines, or its part of one, whenever the server's host asks, until SIGTERM or Ctrl-C.

    Returns:
        The exit status.

    Raises:
        ConfigError: settings that contradict each other, or the server's host refuses this one.
    """
    config = seeing_demo(config)
    begin_logging(server)
    if server.api_server_count:
        raise ConfigError(
            f"api_server_count {server.api_server_count} does not go with headless, where nothing answers HTTP",
            field="api_server_count",
        )
    check_hosts(
        config.hosts,
        num_ranks=config.parallel.num_ranks,
        headless=True,
        backend=config.parallel.distributed_executor_backend,
        num_engines=config.data_parallel.data_parallel_size,
    )
    parallel = config.data_parallel
    has_engines = parallel.data_parallel_size_local is not None or parallel.data_parallel_start_rank is not None
    if config.hosts.nnodes == 1 and not has_engines:
        raise ConfigError(
            "headless is for hosts that have no server of their own: give --nnodes, --node-rank above 0 and "
            "--master-addr, as on the host of node_rank 0, or, for engines of their own, --data-parallel-start-rank "
            "and --data-parallel-address",
            field="headless",
        )
    ranks = engine_ranks(parallel)
    is_stopping = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        is_stopping.set()

    former = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        if has_engines:
            names = f"engine{'s' if ranks.size > 1 else ''} {', '.join(map(str, range(ranks.first, sum(ranks))))}"
            _logger.info("%s of %d, without a server", names, parallel.data_parallel_size)
            serve_engines(config, model_digest(model_folder(config)), is_stopping)
        else:
            _logger.info("node %d of %d runs ranks, without a server", config.hosts.node_rank, config.hosts.nnodes)
            run_node(config, model_folder(config), is_stopping)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    return ExitStatus.OK
