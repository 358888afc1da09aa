"""Where the gRPC server listens, and its beginning and end."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from pathlib import Path
from typing import Any

from quire_interfaces import ConfigError
from quire_server.config import ServerConfig
from quire_server.context import ServerContext
from quire_server.exit_status import CannotListenError
from quire_server.http_server import ABORT_GRACE_S
from quire_server.listening import is_left_behind

try:
    import grpc
    import grpc.aio
    from grpc_health.v1 import health_pb2_grpc
    from smg_grpc_proto import vllm_engine_pb2_grpc
except ImportError as error:
    raise ConfigError(
        f"gRPC needs libraries that are not installed: {error}; install quire-server[grpc]", field="grpc_port"
    ) from None

from quire_server.grpc_service.calls import EndlessCalls
from quire_server.grpc_service.engine_service import EngineService
from quire_server.grpc_service.health import HealthService

__all__ = ["GRPCServer", "check_grpc", "start_grpc"]

_logger = logging.getLogger(__name__)


def check_grpc(config: ServerConfig) -> None:
    """Whether the settings can be served, before anything is loaded.

    Raises:
        ConfigError: they cannot, or the address is taken.
    """
    for name in ("ssl_ciphers", "enable_ssl_refresh"):
        if getattr(config, name):
            raise ConfigError(f"{name} does not hold for gRPC; leave it out, or serve HTTP alone", field=name)
    if config.ssl_cert_reqs == 1:
        raise ConfigError("gRPC asks clients for certificates always (2) or never (0), not 1", field="ssl_cert_reqs")
    if config.grpc_port:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((config.host, config.grpc_port))
            except OSError as error:
                raise _cannot_listen(config.host, config.grpc_port, str(error.strerror)) from None
    if config.grpc_uds is not None:
        path = Path(config.grpc_uds).absolute()
        why = None
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            why = "there is no such folder that this user may write to"
        elif path.exists() and not is_left_behind(path):
            why = "it is there already; choose another --grpc-uds, or stop the program that uses it"
        if why is not None:
            raise CannotListenError(f"cannot listen on {config.grpc_uds!r}: {why}", field="grpc_uds")


def _cannot_listen(host: str, port: int, why: str) -> CannotListenError:
    return CannotListenError(
        f"cannot listen on {host}:{port}: {why}; choose another --grpc-port, or stop the program that uses it",
        field="grpc_port",
    )


class GRPCServer:
    """A server that listens. `run` keeps it until it is cancelled."""

    def __init__(self, server: Any, addresses: dict[str, str], endless: EndlessCalls, stop_timeout_s: float) -> None:
        self._server, self._endless, self._stop_timeout_s = server, endless, stop_timeout_s
        self.addresses = addresses
        """Setting -> what clients are to be given."""

    async def run(self) -> None:
        """Wait until cancelled; then take no new calls, and let those that run finish."""
        try:
            await asyncio.Event().wait()
        finally:
            self._endless.end()
            await self._server.stop(self._stop_timeout_s)


async def start_grpc(context: ServerContext) -> GRPCServer:
    """Listen on the addresses of the settings. The server's caller must run it to its end.

    Args:
        context: Of the HTTP server beside it; the engine must be ready.

    Raises:
        ConfigError: an address is taken.
    """
    config = context.config
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 0),  # else two servers would share the port, and each get a half of the calls
            ("grpc.max_receive_message_length", config.max_body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_concurrent_streams", config.limit_concurrency),
        ]
    )
    endless = EndlessCalls()
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(EngineService(context, endless), server)
    health_pb2_grpc.add_HealthServicer_to_server(HealthService(context, endless), server)
    addresses: dict[str, str] = {}
    if config.grpc_port is not None:
        host = f"[{config.host}]" if ":" in config.host else config.host
        port = _listen(server, config, f"{host}:{config.grpc_port}", "grpc_port")
        addresses["grpc_port"] = f"{host}:{port}"
    if config.grpc_uds is not None:
        addresses["grpc_uds"] = f"unix:{Path(config.grpc_uds).absolute()}"
        _listen(server, config, addresses["grpc_uds"], "grpc_uds")
    await server.start()
    _logger.info("gRPC at %s", " and ".join(addresses.values()))
    return GRPCServer(server, addresses, endless, context.llm.config.engine.shutdown_timeout_s + ABORT_GRACE_S)


def _listen(server: Any, config: ServerConfig, address: str, field: str) -> int:
    """Take an address; its port."""
    try:
        if config.ssl_certfile is None or field == "grpc_uds":
            port: int = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, _credentials(config))
    except RuntimeError as error:
        flag = "--" + field.replace("_", "-")
        raise CannotListenError(
            f"cannot listen on {address}: {error}; choose another {flag}, or stop the program that uses it", field=field
        ) from None
    return port


def _credentials(config: ServerConfig) -> Any:
    certificate = Path(config.ssl_certfile or "").read_bytes()
    key = certificate if config.ssl_keyfile is None else Path(config.ssl_keyfile).read_bytes()
    authorities = None if config.ssl_ca_certs is None else Path(config.ssl_ca_certs).read_bytes()
    return grpc.ssl_server_credentials([(key, certificate)], authorities, config.ssl_cert_reqs == 2)
