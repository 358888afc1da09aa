"""`quire serve --headless`: a host that runs ranks of an engine whose server is on another host. No HTTP, no torch."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType

from quire import QuireConfig
from quire.assemble import model_folder
from quire.demo import seeing_demo
from quire.host_ranks import run_node
from quire.hosts_config import check_hosts
from quire_interfaces import ConfigError
from quire_observability import configure_logging
from quire_server.config import ServerConfig
from quire_server.exit_status import ExitStatus

__all__ = ["serve_headless"]

_logger = logging.getLogger(__name__)


def serve_headless(config: QuireConfig, server: ServerConfig) -> ExitStatus:
    """Run this host's part of the engine whenever node 0 has one, until SIGTERM or Ctrl-C. Returns the exit status.

    Raises:
        ConfigError: settings that contradict each other, or node 0 refuses this host.
    """
    config = seeing_demo(config)
    configure_logging(server.log_level, server.log_format)
    check_hosts(
        config.hosts,
        num_ranks=config.parallel.num_ranks,
        headless=True,
        backend=config.parallel.distributed_executor_backend,
        num_engines=config.data_parallel.data_parallel_size,
    )
    if config.hosts.nnodes == 1:
        raise ConfigError(
            "headless is for hosts that have no server of their own: give --nnodes, --node-rank above 0 and "
            "--master-addr, as on the host of node_rank 0",
            field="headless",
        )
    is_stopping = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        is_stopping.set()

    former = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        _logger.info("node %d of %d runs ranks, without a server", config.hosts.node_rank, config.hosts.nnodes)
        run_node(config, model_folder(config), is_stopping)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    return ExitStatus.OK
